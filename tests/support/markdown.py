"""Checks of Markdown, for the tests of the pages and of the notebooks."""

import re

BULLET = re.compile(r" {0,3}([-+*] |%)")
LISTED = re.compile(r"\s*([-+*]|\d+\.) |\s+\S")


def wrapped_bullets(text):
    """Lines that begin with a sign which Markdown takes for a bullet, or % for a comment.

    A line is one if prose precedes it that announces no list: neither a blank line, nor a colon,
    nor an item or a line that goes on with one.
    """
    found, before, fenced = [], "", False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        prose = before.strip() and not before.rstrip().endswith(":") and not LISTED.match(before)
        if not fenced and BULLET.match(line) and prose:
            found.append(line)
        before = line
    return found
