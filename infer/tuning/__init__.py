"""The best way to draft here: what `infer tune` forecasts, confirms and stores."""
