"""Recipes that say too little, too much, or what cannot be."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from toy_recipe import RECIPE, changed

from gtl.reproduce.recipe import read_recipe

LONGER = {"ending": "long", "method": "lora", "fractions": [0.1], "adapt": {"training": {"budget": 24}}}

BAD: dict[str, tuple[Any, str]] = {
    "not a mapping": (["prepare"], "toy.yaml: a mapping is needed"),
    "empty": ({}, "'prepare' is missing"),
    "unknown": (RECIPE | {"sweep": {}}, "unknown key 'sweep'; choose among prepare, source, worlds"),
    "no prepare": (changed("prepare"), "'prepare' is missing"),
    "no source": (changed("source"), "'source' is missing"),
    "no adapt": (changed("adapt"), "'adapt' is missing"),
    "no sample": (changed("sample"), "'sample' is missing"),
    "no count": (RECIPE | {"sample": {}}, "sample.count, the number of sequences in a set, must be at least 1"),
    "count 0": (RECIPE | {"sample": {"count": 0}}, "sample.count"),
    "a world's key": (changed("worlds", 0, "fraction", to=1), "worlds: unknown key 'fraction'; choose among share"),
    "a world": (RECIPE | {"worlds": [3]}, "worlds: a mapping is needed"),
    "share 1": (changed("worlds", 1, "share", to=1), "share=1 must be in [0, 1)"),
    "share -0.1": (changed("worlds", 1, "share", to=-0.1), "share=-0.1 must be in [0, 1)"),
    "share nan": (changed("worlds", 1, "share", to=float("nan")), "share=nan must be in [0, 1)"),
    "two shares": (changed("worlds", 1, "share", to=0), "two worlds have the same share"),
    "fraction 0": (changed("worlds", 0, "fractions", to=[0.1, 0]), "fraction 0 must be above 0 and at most 1"),
    "fraction 2": (changed("worlds", 0, "fractions", to=[0.1, 2]), "fraction 2 must be above 0 and at most 1"),
    "method": (changed("worlds", 0, "methods", to=["gtl"]), "unknown method 'gtl'; choose among vanilla"),
    "sweeps": (RECIPE | {"sweeps": 3}, "sweeps: a list is needed"),
    "sweeps null": (RECIPE | {"sweeps": None}, "sweeps: a list is needed"),
    "sweep": (RECIPE | {"sweeps": [3]}, "sweeps: a mapping is needed"),
    "two sweeps": (RECIPE | {"sweeps": 2 * RECIPE["sweeps"]}, "two sweeps are of the same method"),
    "sweep's n_ratio": (changed("sweeps", 0, "n_ratio", to=["some"]), "'some' is neither a number of candidates nor"),
    "sweep's shares": (changed("sweeps", 1, "shares", to=[0.1]), "shares [0.1] are not among the worlds', [0, 0.25]"),
    "sweep's key": (changed("sweeps", 0, "gamma", to=[1]), "sweeps: unknown key 'gamma'; choose among method"),
    "sweep's gammas": (changed("sweeps", 0, "gammas"), "sweeps: 'gammas' is missing"),
    "sweep's method": (changed("sweeps", 0, "method", to="gtl"), "unknown method 'gtl'; choose among vanilla"),
    "sweep's fraction": (changed("sweeps", 0, "fractions", to=[2]), "fraction 2 must be above 0 and at most 1"),
    "no worlds": (changed("worlds"), "'worlds' is missing"),
    "no world": (RECIPE | {"worlds": []}, "worlds"),
    "worlds": (RECIPE | {"worlds": 5}, "worlds"),
    **{f"{key} null": (RECIPE | {key: None}, key) for key in
       ("prepare", "source", "mixed", "adapt", "sample", "planned", "likelihood", "measure", "judge", "subsets")},
    "count": (RECIPE | {"sample": {"count": "many"}}, "count"),
    "share": (changed("worlds", 1, "share", to="x"), "share"),
    "fractions": (changed("worlds", 0, "fractions", to=0.1), "fractions"),
    "no methods": (changed("worlds", 1, "methods", to=[]) | {"sweeps": []}, "methods"),
    "one fraction twice": (changed("worlds", 0, "fractions", to=[0.1, 0.1]), "0.1"),
    "no method in a group": (changed("worlds", 0, "methods", to=["gtl-paper", []]), "or of lists of names"),
    "a method that is no list": (changed("worlds", 0, "methods", to="gtl-paper"), "not 'gtl-paper'"),
    "one method in two groups": (changed("worlds", 0, "methods", to=["gtl-paper", ["lora", "gtl-paper"]]), "gtl-paper"),
    "one method twice": (changed("worlds", 0, "methods", to=["gtl-paper", "gtl-paper"]), "gtl-paper"),
    "one subset twice": (RECIPE | {"subsets": [2, 2]}, "subsets"),
    "no draws": (RECIPE | {"draws": []}, "draws"),
    "draw 10": (RECIPE | {"draws": [0, 10]}, "draws"),
    "sweep's subset": (changed("sweeps", 0, "subsets", to=[7]), "subset"),
    "gammas": (changed("sweeps", 0, "gammas", to=2), "gammas"),
    "planner": (RECIPE | {"planner": 3}, "planner"),
    "diagnose": (RECIPE | {"diagnose": [1]}, "diagnose"),
    "fit null": (changed("source", "fit", to=None), "fit"),
    "variants": (RECIPE | {"variants": LONGER}, "variants: a list is needed"),
    "variant's method": (RECIPE | {"variants": [LONGER | {"method": "lore"}]}, "unknown method 'lore'"),
    "variant's fraction": (RECIPE | {"variants": [LONGER | {"fractions": [0]}]}, "fraction 0 must be above 0"),
    "variant's ending": (RECIPE | {"variants": [LONGER | {"ending": "a b"}]}, "'lora-a b': the ending must be letters"),
    "a method's name": (RECIPE | {"variants": [LONGER | {"ending": "iw"}]}, "'lora-iw': the ending must be letters"),
    "no methods of a variant": (RECIPE | {"variants": [LONGER | {"method": []}]}, "a variant's method: a list"),
    "a method of a variant twice": (RECIPE | {"variants": [LONGER | {"method": 2 * ["lora"]}]}, "a variant's method"),
    "two variants": (RECIPE | {"variants": [LONGER, LONGER]}, "'lora-long' is there already"),
    "no change": (RECIPE | {"variants": [LONGER | {"adapt": {}}]}, "lora: an ending of its name and changes to adapt"),
    "no ending": (RECIPE | {"variants": [LONGER | {"ending": ""}]}, "lora: an ending of its name and changes to adapt"),
    "a world's method": (RECIPE | {"variants": [{"method": "gtl-local", "fractions": [1]}]}, "'gtl-local' is there"),
    "variant's subset": (RECIPE | {"variants": [LONGER | {"subsets": [7]}]}, "the variant's subsets [7] are not among"),
    "variants without a world": (changed("worlds", 0) | {"sweeps": [], "variants": [LONGER]}, "where share is 0"),
    "sweep's draw 10": (changed("sweeps", 0, "draws", to=[10]), "draws"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_recipes(tmp_path: Path, case: str):
    """An error that names the file and what is wrong in it, in words of its own."""
    value, part = BAD[case]
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(value))
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'toy.yaml'}: ")) as caught:
        read_recipe(tmp_path / "toy.yaml")
    assert part in str(caught.value).removeprefix(str(tmp_path))
    assert not re.search("object|instances of|format code", str(caught.value))
