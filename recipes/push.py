"""Upload a model, or an adapter, with its card to the Hugging Face Hub, as one commit.

    tnt push runs/tnt_150m/stage2 user/tnt-150m --private
    tnt push runs/tnt_150m/stage2 user/tnt-150m --dry-run      checks and lists what would be uploaded, with no network

The folder is checked first: if its files do not fit together, nothing is uploaded. The same commit removes weights and
code that an earlier push left in the repository and that are not part of this one.
"""

import argparse
import os
import re
import sys
from pathlib import Path

from tnt_hf.command_line import parse_arguments


def push(
    folder: str | os.PathLike,
    repo: str,
    *,
    private: bool = False,
    revision: str = "main",
    message: str | None = None,
    dry_run: bool = False,
    regenerate_card: bool = False,
    license: str | None = None,
    say=print,
) -> str | None:
    """
    Check a folder, write its model card, and upload what belongs to the model.

    Args:
        folder: a saved TNT model, a model with an injected memory, or an adapter.
        repo: `owner/name` on the Hub; created if it does not exist.
        private: make it private, if it is created here; otherwise it is what its owner's are by default.
        revision: the branch to commit to; created if it does not exist.
        message: the commit message.
        dry_run: only check and list: no network, and nothing is written.
        regenerate_card: replace a README.md that somebody wrote or edited, here or in the repository.
        license: for the card's metadata, as the Hub calls it (`apache-2.0`); by default that of the folder's card, or
            of what the model was made from.
        say: called with each line that reports what happens.

    Returns:
        The address of the commit; `None` for a dry run.

    Raises:
        ValueError: the folder, `repo` or `revision` is not acceptable.
        OSError: a file is missing, there is no token, or the Hub cannot be reached or refuses.
    """
    import yaml
    from huggingface_hub import CommitOperationAdd, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    import tnt_hf
    from tnt_hf.conversion.manifest import MANIFEST, add_digests
    from tnt_hf.conversion.source import HUB_ID, inside
    from tnt_hf.recipes.model_card import is_generated, model_card, write_card
    from tnt_hf.recipes.model_folder import read_model
    from tnt_hf.recipes.push_checks import check_files, check_secrets, files_to_push, left_out, public_json

    tnt_hf.register()  # `python -m` does not
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(f"REPO={repo!r}: {error}") from error
    if not HUB_ID.fullmatch(repo):
        raise ValueError(f"REPO={repo!r}: must have the form owner/name")
    if not revision or revision.startswith("-") or any(c in revision for c in " ~^:?*[\\") or ".." in revision:
        raise ValueError(f"revision={revision!r}: is not a branch name")
    if license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", license):
        raise ValueError(f"license={license!r}: must be one of the Hub's names, such as apache-2.0 or other")
    model = read_model(folder)
    files = files_to_push(model)
    notes = check_files(model, files)
    card = model.folder / "README.md"
    if card.exists() or card.is_symlink():
        inside(model.folder, card.name)  # or a link would publish a file of elsewhere
    edited = card.is_file() and not is_generated(card.read_text(encoding="utf-8", errors="replace"), model.folder)
    if edited and not regenerate_card:
        if license is not None:
            raise ValueError(f"license={license!r}: README.md is edited by hand; name the licence in it")
        notes.append("README.md: edited by hand, kept as it is (--regenerate-card replaces it)")
        text = card.read_bytes()
    else:
        text = model_card(model, repo, license=license).encode()
        if "license" not in yaml.safe_load(text.split(b"---\n", 2)[1]):
            notes.append("README.md: says no licence, and neither does what the model was made from (--license ID)")
    check_secrets(card.name, text)
    if not dry_run and not get_token():
        raise PermissionError("no token: run `hf auth login`, or set HF_TOKEN to a token with write access")
    if not dry_run:
        if not edited or regenerate_card:
            write_card(folder, repo, regenerate=regenerate_card, card=text.decode())
        if MANIFEST in files:
            add_digests(model.folder)
    contents: dict[str, bytes | Path] = {name: public_json(name, path) or path for name, path in files.items()}
    sizes = {n: len(x) if isinstance(x, bytes) else x.stat().st_size for n, x in contents.items()}
    sizes["README.md"] = len(text)
    if dry_run:
        say(f"would upload to {repo}{f', branch {revision}' * (revision != 'main')} (nothing is sent):")
    for name, count in sorted(sizes.items()):
        changed = "   (without paths of this machine)" if isinstance(contents.get(name), bytes) else ""
        say(f"{count:>15,}  {name}{changed}")
    say(f"{sum(sizes.values()):>15,}  bytes in {len(sizes)} files")
    if others := left_out(model, files):
        say(f"stays here: {', '.join(others)}")
    for note in notes:
        say(f"note: {note}")
    if dry_run:  # whatever fails a check has raised by now; a token is only asked for where it is needed
        say("all checks passed; the Hub was not asked")
        return None
    contents["README.md"] = card
    operations = [
        CommitOperationAdd(name, x if isinstance(x, bytes) else str(x)) for name, x in sorted(contents.items())
    ]
    return _upload(operations, repo, private, revision, message or f"Upload {model.folder.name}", regenerate_card, say)


def _upload(operations: list, repo: str, private: bool, revision: str, message: str, replace_card: bool, say) -> str:
    """One commit, or none: whatever fails before it leaves the branch as it was."""
    from huggingface_hub import CommitOperationDelete, HfApi
    from huggingface_hub.errors import HTTPError  # of httpx or httpx2, as the Hub's client has it

    from tnt_hf.recipes.model_card import is_generated

    api = HfApi()
    try:
        api.create_repo(repo, private=private or None, exist_ok=True)  # None: as its owner has set
        if revision != "main":
            api.create_branch(repo, branch=revision, exist_ok=True)
        names = {operation.path_in_repo for operation in operations}
        there = api.list_repo_files(repo, revision=revision)
        stale = sorted(name for name in there if is_stale(name) and name not in names)
        if "README.md" in there and not replace_card:
            path = api.hf_hub_download(repo, "README.md", revision=revision)
            theirs = Path(path).read_text(encoding="utf-8", errors="replace")
            ours = next(x for x in operations if x.path_in_repo == "README.md")
            same = theirs == Path(ours.path_or_fileobj).read_text(encoding="utf-8", errors="replace")
            if not same and not is_generated(theirs):
                operations.remove(ours)
                say("note: README.md: edited in the repository, kept as it is (--regenerate-card replaces it)")
        for name in stale:
            say(f"removes {name}, left there by an earlier push")
        operations += [CommitOperationDelete(name) for name in stale]
        commit = api.create_commit(repo, operations, commit_message=message, revision=revision)
    except (HTTPError, OSError, RuntimeError) as error:
        cause = error.__cause__ if isinstance(error, RuntimeError) else None  # how an upload's failure is wrapped
        reason = " ".join(f"{error} {cause or ''}".split()) or type(error).__name__
        refused = getattr(cause or error, "response", None) is not None
        what = "refuses" if refused else "cannot be reached"
        raise OSError(f"{repo}: nothing was committed, the Hub at {api.endpoint} {what} ({reason})") from error
    say(f"pushed to {commit.commit_url}")
    return commit.commit_url


def is_stale(name: str) -> bool:
    """Whether a file of a repository would be read as part of the model: weights, an index, code or an adapter."""
    weights = name.endswith((".safetensors", ".safetensors.index.json", "_tnt.py"))
    return "/" not in name and (weights or name == "adapter_config.json")


def build_parser() -> argparse.ArgumentParser:
    """The command line of `tnt push`."""
    parser = argparse.ArgumentParser(
        prog="tnt push", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="OUT", help="folder of a saved model or adapter")
    parser.add_argument("repo", metavar="REPO", help="owner/name on the Hub; created if it does not exist")
    parser.add_argument(
        "--private", action="store_true", help="private if it is created here; without, as its owner has set"
    )
    parser.add_argument("--revision", default="main", metavar="BRANCH", help="branch to commit to (default: main)")
    parser.add_argument("--message", metavar="TEXT", help="commit message (default: Upload OUT)")
    parser.add_argument("--dry-run", action="store_true", help="only check and list: no network, nothing is written")
    parser.add_argument(
        "--regenerate-card", action="store_true", help="replace a README.md that somebody wrote or edited"
    )
    parser.add_argument("--license", metavar="ID", help="for the card, such as apache-2.0 (default: the source's)")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command. Returns the exit status: 0, or 2 for a mistake in the input."""
    try:
        options = parse_arguments(build_parser(), arguments)
        push(
            options.folder,
            options.repo,
            private=options.private,
            revision=options.revision,
            message=options.message,
            dry_run=options.dry_run,
            regenerate_card=options.regenerate_card,
            license=options.license,
        )
    except BrokenPipeError:  # nobody reads what it prints any more
        raise
    except (ValueError, OSError) as error:
        print(f"tnt push: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
