"""What travels in a checkpoint beside its weights: settings in its config, files that the config names."""
