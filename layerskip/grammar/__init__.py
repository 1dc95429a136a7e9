"""Structured output: a grammar as a logits processor that can be rolled back, and the tokens it forces."""
