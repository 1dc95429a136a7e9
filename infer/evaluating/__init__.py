"""Quality of every exit: what `infer evaluate` measures."""
