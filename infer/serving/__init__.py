"""Requests under load: what `infer load` measures."""
