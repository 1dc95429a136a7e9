"""What each layer would say: what `infer inspect` shows."""
