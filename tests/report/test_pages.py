"""What was measured as Markdown: a summary of rows; texts are shown as they are."""

import html
import re

from drawn import row
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from gtl.report.pages import escaped, samples_page, summary
from gtl.run import Row


def test_a_summary_has_everything_of_a_method_in_one_line():
    rows = [row("lora", 0.5, 1000, 0), row("lora", 0.7, 1000, 1), row("lora", 3600, 1000, metric="steps")]
    rows += [row("lora", 4.25, 1000, metric="nll"), row("lora", 0.25, 100), row("source", 0.03, None)]
    rows = [Row(**{**vars(r), "trainable_weights": 460_800 if r.method == "lora" else None}) for r in rows]
    page = summary(rows, {"lora": "LoRA"}).splitlines()
    assert [line for line in page if line.startswith("#")] == ["## arxiv, n = 1,000", "## arxiv, n = 100"]
    assert page[2].startswith("| | weights | steps | MAUVE | NLL | domain score | ")
    assert {line.count("|") for line in page if line.startswith("|")} == {page[2].count("|")}
    assert page[4].startswith("| LoRA | 0.5 M | 3,600 | 0.6000<br>±&nbsp;0.1000 | 4.250 |  |")
    assert page[5].startswith("| source |  |  | 0.0300 |  |")
    assert page[11].startswith("| LoRA | 0.5 M |  | 0.2500 |  |")


def test_few_weights_are_counted_one_by_one():
    found = [Row(**{**vars(row("lora", 0.5)), "trainable_weights": weights}) for weights in (99_999, 20_620_218)]
    assert "| lora | 99,999 |" in summary(found[:1], {})
    assert "| lora | 99,999<br>20.6 M |" in summary(found, {})  # subsets differ


def test_a_summary_says_how_many_rows_were_borrowed():
    rows = [row("lora", 0.5, 1000), row("lora-iw", 0.6, 1000), row("lora-iw", 40, 1000, metric="borrowed")]
    page = summary([*rows, row("lora", 0.4, 100)], {}).splitlines()
    assert page[2].endswith(" | copied runs of 8 | borrowed rows |")
    assert page[5].endswith(" | 40.0 |")
    assert page[9].endswith(" | copied runs of 8 |")


def test_a_summary_leaves_out_what_was_only_fitted_and_has_real_text_everywhere():
    there = [row("lora", 0.5, 1000), row("real", 0.9, None), row("real", 0.1, None, metric="domain")]
    other = [
        row("lora", 0.4, 950),
        row("gtl-paper", 3600, 950, metric="steps"),
        row("gtl-paper", 8, 47, metric="steps"),
    ]
    page = summary([*there, *(Row(**{**vars(r), "experiment": "arxiv-r0.05"}) for r in other)], {}).splitlines()
    assert [line for line in page if line.startswith("#")] == ["## arxiv, n = 1,000", "## arxiv-r0.05, n = 950"]
    assert not any("gtl-paper" in line for line in page)
    assert sum(line.startswith("| real |  |  | 0.9000 |  | 0.1000 |") for line in page) == 2


def shown(markdown: str) -> list[str]:
    """The items of a page's lists as a reader sees them."""
    page = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(markdown)
    items = re.findall(r"<li>(.*?)</li>", page, re.DOTALL)
    assert all(set(re.findall(r"<[^>]*>", item)) <= {"<br>"} for item in items), items
    lines = [
        [re.sub(r"[ \t]+", " ", line).strip(" ") for line in item.split("<br>")] for item in items
    ]  # as a browser does
    return [html.unescape("\n".join(part)).replace("\xa0", " ") for part in lines]


@given(st.lists(st.text("a1 \n\t\\`*_[]()<>&#~|$-+=.!:;{}", min_size=1), min_size=1, max_size=4))
def test_texts_are_shown_as_they_are(texts: list[str]):
    expected = [text.removesuffix("\n").replace("\t", " ") for text in texts]
    assert shown(samples_page({"gtl_local": texts})) == expected


def test_a_page_of_samples():
    texts = {
        "gtl-local": [f"text {i}" for i in range(30)],
        "n_ratio=4": ["1. we prove $ x _ 1 $ # <b>", "- a * b * c", "&lt; &copy; of", "  two  blanks "],
    }
    page = samples_page(texts)
    assert page.startswith("# Samples\n\nUncurated: the first 10 of each run.\n\n## gtl-local\n\n1. text 0\n")
    assert shown(page) == [*texts["gtl-local"][:10], *texts["n_ratio=4"]]
    assert "<h2>n_ratio=4</h2>" in MarkdownIt("commonmark").render(page)
    assert shown(samples_page(texts, 2)) == ["text 0", "text 1", *texts["n_ratio=4"][:2]]
    assert escaped("plain words, and a state-of-the-art (2019).") == "plain words, and a state-of-the-art (2019)."
