"""Search in pages in Chinese: letters and pairs of neighbouring letters are the words of the index.

Sphinx's own way needs a dictionary of words, leaves single letters out of the index, so that 熵 is
never found, and cannot take a query apart in the browser. Pairs need no dictionary: a text has what
is asked for where it has all of its pairs.
"""

import re

from sphinx.search import SearchLanguage

HAN = "\u3400-\u4dbf\u4e00-\u9fff"


class SearchChinese(SearchLanguage):
    """Letters and pairs of Han letters; other words as they are."""

    lang = "zh"
    language_name = "Chinese"
    stopwords = frozenset()
    js_splitter_code = f"""
function splitQuery(query) {{
  const words = [];
  for (const run of query.match(/[{HAN}]+|(?:(?![{HAN}])[\\p{{L}}\\p{{N}}_])+/gu) ?? []) {{
    if (!/[{HAN}]/u.test(run) || run.length === 1) words.push(run);
    else for (let i = 0; i + 1 < run.length; i++) words.push(run.slice(i, i + 2));
  }}
  return words;
}}
"""

    def split(self, input):
        """The words of a text.

        Examples
        --------
        >>> SearchChinese({}).split("信息熵 entropy")
        ['信', '息', '熵', '信息', '息熵', 'entropy']
        """
        words = []
        for run in re.findall(rf"[{HAN}]+|[^{HAN}\W]+", input):
            if re.match(f"[{HAN}]", run):
                words += [*run, *(run[i : i + 2] for i in range(len(run) - 1))]
            else:
                words.append(run)
        return words

    def word_filter(self, word):
        """Keep single letters."""
        return word != ""
