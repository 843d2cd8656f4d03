"""Text of model cards: `template.md` is filled by `tnt_hf.recipes.model_card`."""
