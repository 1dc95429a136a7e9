"""Ways to decode, side by side: what `infer benchmark` measures, and how it is shown."""
