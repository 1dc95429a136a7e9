"""A checkpoint for others: its model card, its upload, its draft as a model of its own."""
