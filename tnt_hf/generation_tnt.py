"""How `generate` fills and goes on from a cache whose memory cannot forget.

Axis legend
    B batch   T tokens of this call

Each method is the library's of the same name, with what a memory needs before or behind it.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin

from .cache_name_tnt import CACHE_NAME, with_cache_name
from .cache_tnt import TNTCache
from .configuration_tnt import TNTConfig
from .continuation_tnt import (
    BEAMS,
    EndedRows,
    NotingCriteria,
    check_cache,
    check_continuation,
    check_mask,
    check_prompt,
    check_tokens,
    check_usable,
    check_used,
    note_tokens,
)
from .masks_tnt import build_masks


class TNTGenerationMixin(GenerationMixin):
    """`generate` for [`TNTForCausalLM`]."""

    def init_continuous_batching(self, *args, **kwargs):
        """Raises: its paged cache has no room for memory state, and a model without memory takes only a `Cache`."""
        raise ValueError(
            "generate_batch and continuous batching: a TNT model cannot use their paged cache; use generate() with"
            " rows padded on the left."
        )

    @staticmethod
    @with_cache_name
    def create_masks_for_generate(
        config: TNTConfig,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        cache: Cache | None,
        **_: Any,
    ) -> dict[str, Any]:
        """Masks of a compiled decoding step, see [`build_masks`]."""
        if cache is not None:
            check_cache(cache, config)
            check_continuation(cache, attention_mask, cache.get_seq_length(), inputs_embeds.shape[1])
        return build_masks(config, inputs_embeds, attention_mask, cache)

    def _get_static_cache_init_shape(self):
        # The memory-only variant keeps keys of no width, which the cache learns from its first update.
        return None if self.config.variant == "lmm" else super()._get_static_cache_init_shape()

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        """[`TNTCache`] by default; what cannot hold a memory is refused here, before any compute."""
        kind, cache = generation_config.cache_implementation, model_kwargs.get(CACHE_NAME)
        if self._is_stateful and getattr(generation_config, "is_assistant", False):
            raise ValueError(
                "assistant_model: with memory or a window it cannot draft, as its tokens cannot be taken back."
            )
        if self.config.memory_layer_indices and kind is not None and ("offloaded" in kind or kind == "quantized"):
            raise ValueError(f"cache_implementation={kind!r} keeps no memory state; use None, 'dynamic' or 'static'.")
        if cache is not None:
            check_cache(cache, self.config)
            check_usable(cache)
            check_used(generation_config.use_cache)
            mask, past = model_kwargs.get("attention_mask"), int(cache.get_seq_length())
            if (columns := self._columns(generation_config, model_kwargs, past + 1)) <= past:
                check_prompt(cache, columns, columns)
            if past and mask is not None and mask.ndim == 2:
                check_mask(cache, mask, past)
        if cache is None and kind in (None, "dynamic") and generation_config.use_cache is not False:
            cache = model_kwargs[CACHE_NAME] = TNTCache(self.config)
        else:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
            cache = model_kwargs.get(CACHE_NAME)
        if cache is not None:
            cache.ended = generation_config._ended = EndedRows()

    def _prefill(self, input_ids, generation_config, model_kwargs, is_first_iteration=True):
        """That of the library, of tokens that follow the cached ones."""
        embeds, piece = model_kwargs.get("inputs_embeds"), generation_config.prefill_chunk_size
        embeds = embeds if is_first_iteration else None
        given = (input_ids if embeds is None else embeds).shape[1]
        if embeds is not None and piece is not None and given > min(piece, input_ids.shape[1]):
            raise ValueError(f"prefill_chunk_size={piece}: only input_ids are read in pieces, not inputs_embeds.")
        if (cache := model_kwargs.get(CACHE_NAME)) is not None:
            columns = self._columns(generation_config, model_kwargs, given)
            check_prompt(cache, given, columns, new=embeds is None)
            if embeds is None and given == columns:
                check_tokens(cache, input_ids, model_kwargs.get("attention_mask"))
        return super()._prefill(input_ids, generation_config, model_kwargs, is_first_iteration)

    @staticmethod
    def _columns(generation_config, model_kwargs, default: int) -> int:
        """Of the mask, which `generate` drops if it is all ones, and keeps its length."""
        mask = model_kwargs.get("attention_mask")
        return getattr(generation_config, "_mask_length", default) if mask is None else mask.shape[1]

    def _sample(self, input_ids, *args, **model_kwargs):
        """That of the library, after which the cache knows what tokens it holds."""
        returned = super()._sample(input_ids, *args, **model_kwargs)
        if (cache := model_kwargs.get(CACHE_NAME)) is not None and model_kwargs.get("inputs_embeds") is None:
            note_tokens(cache, returned if isinstance(returned, Tensor) else returned.sequences)
        return returned

    def _assisted_decoding(self, input_ids, *args, **model_kwargs):
        """That of the library, whose first call takes all tokens of `input_ids` for new ones."""
        if (cache := model_kwargs.get(CACHE_NAME)) is not None:
            given = input_ids.shape[1]
            columns = self._columns(model_kwargs["generation_config"], model_kwargs, given)
            check_prompt(cache, given, columns, whole=False)
            if model_kwargs.get("attention_mask") is not None and cache.get_seq_length():
                raise ValueError(
                    f"attention_mask: has padding, which assisted decoding behind a filled {CACHE_NAME} cannot say."
                )
        return super()._assisted_decoding(input_ids, *args, **model_kwargs)

    def _beam_search(self, *args, **model_kwargs):
        """That of the library. Rows of the cache are then those that a next step would have been for."""
        cache = model_kwargs.get(CACHE_NAME)
        if cache is None:
            return super()._beam_search(*args, **model_kwargs)
        past, cache.holds_beams = int(cache.get_seq_length()), True
        try:
            return super()._beam_search(*args, **model_kwargs)
        finally:
            cache.holds_beams = False
            if int(cache.get_seq_length()) != past:
                cache.unusable = BEAMS

    def _get_stopping_criteria(self, generation_config, *args, **kwargs):
        """Those of the library, which note what rows they end if such rows get padding."""
        criteria = super()._get_stopping_criteria(generation_config, *args, **kwargs)
        ended = getattr(generation_config, "_ended", None)
        padded = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        padded &= generation_config.num_beams in (None, 1)  # beams that have ended are set aside
        return NotingCriteria(criteria, ended) if ended is not None and padded else criteria

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, **kwargs):
        """What rows get that have ended is padding in `attention_mask`, so that the cache can be gone on from."""
        model_kwargs = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get(CACHE_NAME)
        notes = getattr(cache, "ended", None) or EndedRows()
        if (ended := notes.rows) is not None:
            if (mask := model_kwargs.get("attention_mask")) is None:
                mask = torch.ones(len(ended), cache.get_seq_length() + 1, dtype=torch.long, device=ended.device)
            mask[:, -1] = ~ended
            model_kwargs["attention_mask"] = mask
        notes.mask = model_kwargs.get("attention_mask")
        return model_kwargs
