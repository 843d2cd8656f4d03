"""Filling the folder of a conversion: shards, companions, code, configuration, and a digest of each."""

import json
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

import tnt_hf
from tnt_hf.configuration_tnt import TNTConfig
from tnt_hf.conversion.files import (
    ROOM,
    check_room,
    copy_file,
    copy_unread,
    flush,
    known_digest,
    naming,
    sha256,
)
from tnt_hf.conversion.head_start import HeadStart
from tnt_hf.conversion.layout import MEMORY
from tnt_hf.conversion.manifest import file_entry
from tnt_hf.conversion.plan import Shard
from tnt_hf.conversion.shards import NewTensor, Written, inspect, write_shard
from tnt_hf.conversion.source import INDEX, Source, read_header


# From the package itself: this folder lies beside it in a clone and inside it once installed.
CODE = Path(tnt_hf.__file__).resolve().parent


class Writer:
    """
    Writes a conversion into `folder`, with everything on disk when it returns.

    Args:
        source: where shards and companions come from.
        link: `"auto"`, `"link"` or `"copy"`. check: read linked and copied shards as well.
        progress: show a bar, in bytes. say: told how the shards came here, and why.
        begun: copies that are under way.
    """

    def __init__(
        self,
        source: Source,
        folder: Path,
        link: str,
        check: bool,
        progress: bool,
        say: Callable[[str], object],
        begun: HeadStart | None,
    ):
        self.source, self.folder, self.link, self.check = source, folder, link, check
        self.progress, self.say, self.begun = progress, say, begun
        self.how: dict[str, str] = {}
        self.digests: dict[str, Future | str | None] = {}
        self.unread: set[str] = set()
        self.flushes: list[Future] = []

    def weights(self, shards: list[Shard], index: dict[str, str], memory: list[NewTensor]) -> None:
        """
        All shards. What is copied is looked at on its way, if at all; what is new is read back while it is written.

        Args:
            shards: of the base. index: tensor name -> shard, without the memory. memory: the memory's tensors.

        Raises:
            OSError: no space, or a link that cannot be made. ValueError: a tensor holds nan or infinity.
        """
        linking = self._can_link([shard.source for shard in shards if shard.source])
        if memory:
            shards = [*shards, Shard(MEMORY, None, memory, sum(tensor.nbytes for tensor in memory))]
            index = index | {tensor.name: MEMORY for tensor in memory}
        need = sum(shard.size for shard in shards if not (linking and shard.source))
        check_room(self.folder, need + ROOM - (self.begun.copied if self.begun else 0))

        from huggingface_hub.utils import tqdm

        bar = tqdm(total=need, unit="B", unit_scale=True, unit_divisor=1024, disable=not self.progress, desc="convert")
        # SHA-256 is slower than a fast disk, so two at a time.
        pool = ThreadPoolExecutor(2)
        try:
            with bar:
                if self.begun:
                    self.begun.follow(bar.update)
                for shard in shards:
                    self._write(shard, linking, bar.update, pool)
                    tasks = [digest for digest in self.digests.values() if isinstance(digest, Future)]
                    # All but the last two: what is read back should still be in the page cache, and a bad tensor
                    # should stop the work now and not at the end.
                    for task in tasks[:-2]:
                        task.result()
                self.digests = {name: x.result() if isinstance(x, Future) else x for name, x in self.digests.items()}
                for task in self.flushes:
                    task.result()
        finally:
            pool.shutdown(cancel_futures=True)
        total = sum(tensor.nbytes for shard in shards for tensor in read_header(self.folder / shard.name))
        text = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
        self.text(INDEX, json.dumps(text, indent=2) + "\n")

    def _write(self, shard: Shard, linking: bool, advance: Callable[[int], object], pool: ThreadPoolExecutor) -> None:
        path, origin = self.folder / shard.name, shard.source
        if origin is None:
            where = f"{shard.name} (made from {self.source.name})"

            def follow(written: Written) -> None:
                self.digests[shard.name] = pool.submit(inspect, path, read_header(path), where, wait=written.wait)

            self.how[shard.name] = "written"
            write_shard(path, shard.tensors, advance, follow)
            self.flushes.append(pool.submit(flush, path))
            return
        self.how[shard.name] = "linked" if linking else "copied"
        if linking:
            os.link(origin, path)
        if self.check:
            read, also = (path, ()) if linking else (origin, (path, advance))
            digest = pool.submit(inspect, read, read_header(read), str(origin), *also)
        elif linking:
            digest = known_digest(origin)
        else:
            digest = (self.begun and self.begun.take(origin)) or pool.submit(copy_unread, origin, path, advance)
        if not self.check:
            self.unread.add(shard.name)
        self.digests[shard.name] = digest

    def _can_link(self, origins: list[Path]) -> bool:
        """
        Whether all shards can be linked, found out by linking one.

        Raises:
            OSError: they cannot, and `link="link"`.
        """
        if self.link == "copy" or not origins or self.begun:
            return False
        trial = self.folder / ".link"
        try:
            for origin in origins:
                os.link(origin, trial)
                trial.unlink()
        except OSError as error:
            if self.link == "link":
                raise OSError(error.errno, f"link='link': {error.strerror}", str(origin)) from error
            self.say(f"copying the shards: a hard link of {origin.name} is not possible here ({error.strerror})")
            return False
        return True

    def companions(self) -> None:
        """Tokenizer, generation config and licence files of the source."""
        for name, origin in self.source.companions.items():
            (self.folder / name).parent.mkdir(exist_ok=True)
            copy_file(origin, self.folder / name, lambda count: None)
            self._done(name, "copied")
        if GENERATION_CONFIG_NAME not in self.source.companions and (settings := self._generation_settings()):
            self.text(GENERATION_CONFIG_NAME, settings.to_json_string())

    def _generation_settings(self) -> GenerationConfig | None:
        """What old checkpoints say in config.json about generation, which the library reads from there, and a model's
        configuration does not keep. `None`: nothing but tokens.

        Raises:
            ValueError: a value that the library refuses.
        """
        kept = TNTConfig().to_dict()
        rest = {name: value for name, value in self.source.fields.items() if name not in kept}
        if GenerationConfig.from_model_config(rest).to_dict() == GenerationConfig.from_model_config({}).to_dict():
            return None
        settings = GenerationConfig.from_model_config(dict(self.source.fields))
        settings._from_model_config = False  # from now on of a file of their own
        return settings

    def code(self) -> None:
        """The files `trust_remote_code` runs, so that the result works where this package is not installed."""
        for path in sorted(CODE.glob("*_tnt.py")):
            copy_file(path, self.folder / path.name, lambda count: None)
            self._done(path.name, "copied")

    def plot(self, errors: list[float], chosen: list[int] | None, losses: list[float] | None) -> None:
        """What a window does to each layer as a picture, see [`~sensitivity.plot`]."""
        from tnt_hf.conversion.sensitivity import plot

        path = self.folder / "window_errors.png"
        with naming(path):
            plot(errors, path, chosen, losses)
        self._done(path.name, "written")

    def text(self, name: str, content: str) -> None:
        """A text file of our own."""
        path = self.folder / name
        with naming(path), path.open("w", encoding="utf-8") as file:
            file.write(content)
        self._done(name, "written")

    def _done(self, name: str, how: str) -> None:
        flush(self.folder / name)
        self.how[name], self.digests[name] = how, sha256(self.folder / name)

    def entries(self) -> dict[str, dict[str, Any]]:
        """What the manifest says of every file."""
        return {
            name: file_entry(self.folder / name, how, self.digests[name], name not in self.unread)
            for name, how in self.how.items()
        }
