"""Message catalogs and the dictionary of Debian: which pairs come out of them."""

from __future__ import annotations

import struct

import pytest

from mptrain.system.errors import DataError
from mptrain.workloads.base.data_files import Faults
from mptrain.workloads.translation.datasets.gettext_pairs import load_gettext, read_compiled, read_text
from mptrain.workloads.translation.datasets.number_words import name_of
from mptrain.workloads.translation.datasets.trans_de_en import load_trans_de_en, read_sentences, sentences_in
from mptrain.workloads.translation.pair_dataset import Pair

PO = r"""# A comment.
msgid ""
msgstr ""
"Content-Type: text/plain; charset=UTF-8\n"

#: file.py:1
msgid "yes"
msgstr "oui"

msgid ""
"a long "
"\"message\"\n"
msgstr "un long « message »\n"

msgctxt "month"
msgid "May"
msgstr "mai"

msgid "%d day"
msgid_plural "%d days"
msgstr[0] "%d jour"
msgstr[1] "%d jours"

#, fuzzy
msgid "doubtful"
msgstr "douteux"

msgid "untranslated"
msgstr ""

#~ msgid "old"
#~ msgstr "vieux"
"""
PLAIN = {"yes": "oui", 'a long "message"\n': "un long « message »\n"}


def compiled(messages, order="<", charset="UTF-8"):
    """A catalog as msgfmt writes it."""
    header = f"Content-Type: text/plain; charset={charset}\n"
    entries = sorted({"": header, **messages}.items())
    sources, targets = ([text.encode(charset) for text in column] for column in zip(*entries, strict=True))
    begin = 28
    place = begin + 16 * len(entries)
    tables, texts = [b"", b""], b""
    for table, column in enumerate((sources, targets)):
        for text in column:
            tables[table] += struct.pack(f"{order}2I", len(text), place + len(texts))
            texts += text + b"\0"
    head = struct.pack(f"{order}7I", 0x950412DE, 0, len(entries), begin, begin + 8 * len(entries), 0, 0)
    return head + tables[0] + tables[1] + texts


def catalog(folder, language="fr", name="app.mo", count=60):
    path = folder / language / "LC_MESSAGES" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(compiled({name_of(number, "en"): name_of(number, "fr") for number in range(count)}))
    return path


def test_plain_messages_come_out_of_a_text_catalog(tmp_path):
    (tmp_path / "a.po").write_text(PO, encoding="utf-8")
    assert read_text(tmp_path / "a.po") == PLAIN


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ('msgid "a"\nmsgstr "x"\nmsgid "b"\nmsgstr "y"\n', {"a": "x", "b": "y"}),
        ('msgid "a"\nmsgstr "x"\n#: a.c:2\nmsgid "b"\nmsgstr "y" ', {"a": "x", "b": "y"}),
        ('msgid "a"\nmsgstr "x"\n#, fuzzy\nmsgid "b"\nmsgstr "y"\nmsgid "c"\nmsgstr "z"', {"a": "x", "c": "z"}),
        ('#, fuzzy\n#~ msgid "old"\n#~ msgstr "x"\nmsgid "b"\nmsgstr ""\n"y"', {"b": "y"}),
        ('#, fuzzy\n\nmsgid "b"\nmsgstr "y"', {"b": "y"}),
        ('msgctxt "m"\nmsgid "a"\nmsgstr "x"\nmsgid "b"\n"c"\nmsgstr "y"', {"bc": "y"}),
        ('msgid "a"\nmsgid_plural "as"\nmsgstr[0] "x"\nmsgstr[1] "xs"\nmsgid "b"\r\nmsgstr "y"', {"b": "y"}),
    ],
)
def test_messages_need_no_blank_line_between_them(tmp_path, content, found):
    (tmp_path / "a.po").write_bytes(content.encode())
    assert read_text(tmp_path / "a.po") == found


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("charset", ["UTF-8", "ISO-8859-1"])
def test_plain_messages_come_out_of_a_compiled_catalog(tmp_path, order, charset):
    more = {"month\x04May": "mai", "%d day\0%d days": "%d jour\0%d jours"}
    (tmp_path / "a.mo").write_bytes(compiled({**PLAIN, **more}, order, charset))
    assert read_compiled(tmp_path / "a.mo") == PLAIN


def test_the_standard_library_reads_the_same_out_of_it(tmp_path):
    import gettext

    path = catalog(tmp_path)
    with path.open("rb") as file:
        theirs = gettext.GNUTranslations(file)
    ours = read_compiled(path)
    assert len(ours) == 60
    assert all(theirs.gettext(source) == target for source, target in ours.items())


@pytest.mark.parametrize(
    ("read", "content", "said"),
    [
        *[(read_compiled, content, "magic number|table|end") for content in (b"", b"no catalog")],
        *[(read_compiled, compiled(PLAIN)[:end], "magic number|table|end") for end in (40, -30)],
        *[
            (read_text, content, "cannot understand")
            for content in (b'msgid "open\nmsgstr "zu"', b"nonsense", b'msgid "a"\nmsgstr "\\x"')
        ],
    ],
)
def test_a_damaged_catalog_is_an_error_of_its_value(tmp_path, read, content, said):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match=said):
        read(tmp_path / "a")


class TestGettext:
    def test_all_catalogs_of_the_language_are_read_each_message_once(self, tmp_path):
        catalog(tmp_path / "conf", count=60)
        catalog(tmp_path / "contrib" / "admin", count=70)
        catalog(tmp_path, language="de")
        (tmp_path / "conf" / "fr" / "LC_MESSAGES" / "app.po").write_text(
            "damaged, and not read: the compiled one is there"
        )
        dataset = load_gettext(path=tmp_path, vocabulary=80)
        assert len(dataset.train) + len(dataset.val) + len(dataset.test) == 70
        assert len(dataset.card()["files"]["train"]) == 2
        assert dataset.describe().endswith(" pieces, 60 repeated")

    def test_catalogs_of_a_package_are_found_without_importing_it(self, tmp_path, monkeypatch):
        package = tmp_path / "carrier_of_catalogs"
        catalog(package / "locale")
        (package / "__init__.py").write_text("raise RuntimeError('imported')")
        monkeypatch.syspath_prepend(str(tmp_path))
        assert len(load_gettext(package="carrier_of_catalogs", vocabulary=80).train) == 48

    def test_what_is_missing_is_said_with_what_would_do(self, tmp_path):
        with pytest.raises(DataError, match="the package 'nosuchpackage' is not installed") as missing:
            load_gettext(package="nosuchpackage")
        assert "pip install nosuchpackage" in missing.value.hint
        catalog(tmp_path, language="pt_BR")
        with pytest.raises(DataError, match="no catalog fr/LC_MESSAGES") as missing:
            load_gettext(path=tmp_path)
        assert "pt_BR" in missing.value.hint

    def test_a_damaged_catalog_stops_or_is_skipped_and_counted(self, tmp_path, stops_or_skips):
        catalog(tmp_path)
        catalog(tmp_path, name="bad.mo").write_bytes(b"bad")
        stops_or_skips(load_gettext, r"bad\.mo: not a catalog", path=tmp_path, vocabulary=80)


class TestDictionary:
    def test_examples_that_are_sentences_in_both_languages_are_pairs(self):
        line = (
            "wissen {vt} | wissend | Ich weiß es nicht. | Weißt du es? [ugs.] | etw. über jdn. wissen. | Er kam (nicht). "
            ":: to know {knew; known} | knowing | I don't know.; I dunno. [coll.] | Do you know it? | to know sth. | He came."
        )
        assert list(sentences_in(line)) == [
            Pair("Ich weiß es nicht.", "I don't know."),
            Pair("Weißt du es?", "Do you know it?"),
        ]
        for other in ("# Ein Satz. :: A sentence.", "Ein Satz ohne Trenner.", "", "Halt! :: Stop!"):
            assert not list(sentences_in(other))
        assert not list(sentences_in("Ein Satz. | Noch einer. :: Only one sentence."))

    def test_a_small_dictionary_in_either_direction(self, tmp_path):
        path = tmp_path / "de-en"
        lines = [f"Das ist {name_of(n, 'de')}. :: This is {name_of(n, 'en')}." for n in range(100)]
        path.write_text("\n".join([*lines, *lines[:3]]), encoding="utf-8")
        dataset = load_trans_de_en(path=path, vocabulary=90)
        assert dataset.source.decode(dataset.train.fetch([0], 0, 0).inputs[0].tolist()).startswith("Das ist")
        other = load_trans_de_en(path=path, vocabulary=90, source="en")
        assert other.source.decode(other.train.fetch([0], 0, 0).inputs[0].tolist()).startswith("This is")
        assert dataset.repeated == other.repeated == 3

    def test_what_is_missing_is_said_with_what_would_do(self, tmp_path):
        with pytest.raises(DataError, match="cannot be read: No such file") as missing:
            load_trans_de_en(path=tmp_path / "nosuch")
        assert "apt install trans-de-en" in missing.value.hint
        (tmp_path / "other").write_text("some text")
        with pytest.raises(DataError, match="has no line"):
            load_trans_de_en(path=tmp_path / "other")

    def test_a_line_that_is_not_utf_8_stops_or_is_counted(self, tmp_path):
        (tmp_path / "d").write_bytes(b"caf\xe9. :: x.\nEin Satz. :: A sentence.\n")
        with pytest.raises(DataError, match="line 1: byte 4 is not UTF-8"):
            read_sentences(tmp_path / "d", Faults())
        faults = Faults("skip")
        assert read_sentences(tmp_path / "d", faults) == [Pair("Ein Satz.", "A sentence.")]
        assert len(faults.unusable) == 1
