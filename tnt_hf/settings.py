"""Values that people write on a command line or into a file of settings."""

import re
from typing import Any


def parse_yaml(text: str) -> Any:
    """
    YAML in which `1e-6` is a number, as in JSON and YAML 1.2; PyYAML reads YAML 1.1, where it is a string.

    Raises:
        ValueError: the text is no YAML.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    number = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{text[:60]!r} is no YAML ({' '.join(str(error).split())})") from error
