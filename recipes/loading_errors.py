"""Errors of files that others made, in one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

from tnt_hf.conversion.source import check_reachable
from tnt_hf.recipes.arguments import NEW_MODELS


@contextmanager
def reading(what: str, failed: str = "cannot be read") -> Iterator[None]:
    """What a damaged file, configuration, tokenizer or template causes is a `ValueError` that names `what` once."""
    try:
        yield
    except BrokenPipeError:  # of whoever read the output
        raise
    except (ImportError, OSError, ValueError) as error:
        said = " ".join(str(error).split())
        raise ValueError(said if said.startswith(what) else f"{what}: {said}") from error
    except Exception as error:  # of many libraries, each with its own
        raise ValueError(f"{what}: {failed}, {type(error).__name__}: {' '.join(str(error).split())[:300]}") from error


@contextmanager
def naming(field: str, name: str, attention: str | None = None):
    """Errors of the library's loading are one of ours that says which field of the recipe it is about; so is
    `attn_implementation` where its package is missing."""
    try:
        if name not in NEW_MODELS:
            check_reachable(name)
        yield
    except OSError as error:
        near = get_close_matches(name, NEW_MODELS, n=1) if field == "model" and not Path(name).exists() else []
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise OSError(f"{field}={name!r}:{hint} {error}") from error
    except ImportError as error:
        if attention is not None:
            field, name = "attn_implementation", attention
        raise ValueError(f"{field}={name!r}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{field}={name!r}: {error}") from error
    except Exception as error:  # what damaged files cause in many libraries
        first = str(error).strip().partition("\n")[0][:300]
        raise ValueError(f"{field}={name!r}: cannot be read, {type(error).__name__}: {first}") from error
