"""Conversion of pretrained checkpoints, imported as `tnt_hf.conversion`. Empty in this version."""
