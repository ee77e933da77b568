"""What fits cost, in words."""

from dataclasses import replace

from drawn import row

from gtl.report.cost import cost, labels, million
from gtl.run import Row


def fit(method: str, weights: int | None, steps: float, n: int = 100) -> Row:
    return replace(row(method, steps, n, metric="steps"), trainable_weights=weights)


def test_weights_in_millions_where_there_are_many():
    assert [million(number) for number in (17, 99_999, 460_800, 20_620_218)] == ["17", "99,999", "0.5 M", "20.6 M"]


def test_the_least_and_the_most():
    assert cost([fit("a", 20_620_218, 3600)]) == "20.6 M weights, 3,600 steps"
    fits = [fit("a", 22_022_385, 3600), fit("a", 20_620_218, 900, 10), fit("a", 21_000_000, 1200)]
    assert cost(fits) == "20.6 M to 22.0 M weights, 900 to 3,600 steps"
    assert cost([fit("a", 1_402_167, 3600), fit("a", 1_432_689, 3600)]) == "1.4 M weights, 3,600 steps"


def test_what_is_not_known_is_not_said():
    assert cost([row("a", 0.5)]) == cost([]) == ""
    assert cost([fit("a", None, 3600)]) == "3,600 steps"
    assert cost([replace(row("a", 0.5), trainable_weights=500)]) == "500 weights"


def test_a_legend_has_each_method_with_its_own_cost():
    rows = [fit("lora", 460_800, 3600), fit("finetuned", 20_620_218, 3425), row("source", 0.1, None)]
    assert labels(rows, ["lora", "source", "finetuned"], {"lora": "LoRA"}) == {
        "lora": "LoRA\n0.5 M weights, 3,600 steps",
        "source": "source",
        "finetuned": "finetuned\n20.6 M weights, 3,425 steps",
    }
