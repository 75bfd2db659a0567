"""The sentences of the notes: each has a row or a reason, and each row its sentence."""

import importlib.util
import re

from support.examples import ROOT

from sdpa_lab.claims import IDS, claims, sentences
from sdpa_lab.claims.sentences import Sentence

SAID = sentences.sentences()
FILE = sentences.contents()


def _tool():
    spec = importlib.util.spec_from_file_location("claims_map", ROOT / "tools/claims_map.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


claims_map = _tool()


def test_a_sentence_has_rows_that_exist_or_a_reason():
    assert len(SAID) > 250
    for sentence in SAID:
        assert bool(sentence.rows) != bool(sentence.why), sentence
        assert set(sentence.rows) <= set(IDS), sentence
        assert sentence.why in ("", "definition") or len(sentence.why) > 12, sentence
        assert sentence.words == sentence.words.strip() != "", sentence
        assert re.fullmatch(r"[1-9]\d*(-[1-9]\d*)?", sentence.lines), sentence
        first, _, last = sentence.lines.partition("-")
        assert int(first) < int(last or 1000), sentence


def test_every_row_judges_a_sentence_or_says_why_it_is_there():
    own = set(FILE["own"])
    assert {name for name in IDS if not sentences.of_row(name)} == own
    assert all(len(why) > 12 for why in FILE["own"].values())


def test_sentences_are_in_the_order_of_the_notes():
    places = [(s.note, int(s.lines.partition("-")[0])) for s in SAID]
    assert places == sorted(places)
    assert len(set(SAID)) == len(SAID)


def test_every_quotation_was_compared_with_its_line():
    """The notes are not here: the stamp says that nothing changed since they were at hand."""
    assert list(FILE["notes"]) == ["000", "001", "002", "003", "004"]
    assert FILE["checked"] == sentences.stamp(FILE["notes"])


def test_a_changed_quotation_loses_the_stamp(monkeypatch):
    for change in ({"words": "x"}, {"lines": "1"}, {"note": "004"}):
        changed = (SAID[0]._replace(**change), *SAID[1:])
        monkeypatch.setattr(sentences, "sentences", lambda changed=changed: changed)
        assert sentences.stamp(FILE["notes"]) != FILE["checked"]


def test_quotations_are_compared_with_the_notes(tmp_path, monkeypatch):
    for note in FILE["notes"]:
        (tmp_path / f"{note}_name.txt").write_text("first\nsecond\nthird", encoding="utf-8")
    source = tmp_path / "sentences.json"
    source.write_text('{"000": "", "checked": ""}', encoding="utf-8")
    monkeypatch.setattr(claims_map, "SOURCE", source)
    right = (Sentence("000", "2", "second"), Sentence("004", "1-3", "first\nsecond"))
    monkeypatch.setattr(claims_map, "sentences", lambda: (*right, Sentence("001", "3", "second")))
    assert list(claims_map.compare(tmp_path)) == ["001 L3: expected the words 'second'"]
    assert '"checked": ""' in source.read_text(encoding="utf-8")
    monkeypatch.setattr(claims_map, "sentences", lambda: right)
    assert list(claims_map.compare(tmp_path)) == []
    assert re.fullmatch(r'\{"000": "[0-9a-f]{64}", "checked": "[0-9a-f]{64}"\}', source.read_text())
    (tmp_path / "003_name.txt").unlink()
    (missing,) = claims_map.compare(tmp_path)
    assert missing.startswith("notes: expected texts whose names begin with ['003'] in")


def test_the_page_is_made_from_the_file():
    assert (ROOT / "docs/claims-map.md").read_text(encoding="utf-8") == claims_map.page()


def test_a_row_knows_its_notes_and_lines():
    record = claims()["toy-512"]
    assert record.notes == {"003": ["95", "99"]}
    assert [sentence.place for sentence in record.said] == ["003 L95", "003 L99"]
