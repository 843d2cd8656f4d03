"""Training recipes and the demo, imported as `tnt_hf.recipes`."""
