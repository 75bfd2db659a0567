"""What the first screen and the report say, in the reader's language, from words.toml.

The sentences of both languages stand side by side there, with the same measured values in them.
"""

import locale
import os
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

LANGUAGES = ("en", "zh")
FILE = Path(__file__).with_name("words.toml")


def preferred(environment: Mapping[str, str] = os.environ) -> str:
    """The language of the system: of its locale, English where that is neither.

    Examples
    --------
    >>> from sdpa_lab.report import words
    >>> words.preferred({"LANG": "zh_CN.UTF-8"}), words.preferred({"LANG": "de_DE.UTF-8"})
    ('zh', 'en')
    """
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        if environment.get(name):
            found = environment[name]
            break
    else:  # Windows sets none of them
        found = locale.getlocale()[0] or ""
    return "zh" if found.lower().startswith(("zh", "chinese")) else "en"


def say(name: str, /, language: str, **values: Any) -> str:
    """The sentence of this name.

    Examples
    --------
    >>> from sdpa_lab.report import words
    >>> words.say("ratio", "zh", ratio=2.04, direction="前向")
    '前向 2.0 倍'
    """
    return sentences()[name][language].format(**values)


def both(name: str, /, **values: Any) -> str:
    """The sentence in every language as HTML, of which the page shows one; `code` is marked.

    A value may be a dictionary with a text for each language.

    Examples
    --------
    >>> from sdpa_lab.report import words
    >>> words.both("show")
    '<span class="en" lang="en">Show</span><span class="zh" lang="zh">显示</span>'
    """
    texts = {
        language: say(
            name,
            language,
            **{key: v[language] if isinstance(v, dict) else v for key, v in values.items()},
        )
        for language in LANGUAGES
    }
    return spans(texts)


def spans(texts: Mapping[str, str]) -> str:
    """Plain texts by language as HTML, of which the page shows one."""
    return "".join(
        f'<span class="{language}" lang="{language}">{_marked(texts[language])}</span>'
        for language in LANGUAGES
    )


def _marked(text: str) -> str:
    return re.sub("`(.*?)`", r"<code>\1</code>", escape(text))


@cache
def sentences() -> dict[str, dict[str, str]]:
    """All of them, by name and language."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))
