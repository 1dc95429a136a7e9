"""The recipe and its parts, hung on a model by `prepare`, in any loop."""
