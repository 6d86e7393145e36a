"""Settings and targets."""

from __future__ import annotations

import math
import sys
from dataclasses import FrozenInstanceError, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from actorlearner.config import Settings, config_dir, resolve, setting, unknown_key
from actorlearner.contracts import SettingError


@dataclass(frozen=True, kw_only=True)
class Inner(Settings):
    group = "outer.inner"

    size: int = setting(3, low=1)


@dataclass(frozen=True, kw_only=True)
class Outer(Settings):
    group = "outer"

    count: int = setting(1, low=0, below=10**6)
    rate: float = setting(0.5, above=0, high=1)
    flag: bool = False
    name: str = "a"
    path: Path | None = None
    limit: int | None = setting(None, low=1)
    mode: Literal["auto", "off"] = "auto"
    sizes: tuple[int, ...] = setting((1, 2), low=1)
    pair: tuple[float, int] = (0.0, 1)
    knots: tuple[tuple[float, float], ...] = setting(((0, 1),), low=0)
    more: dict[str, Any] = setting({})
    inner: Inner = field(default_factory=Inner)
    anything: Any = None


class TestConversion:
    @pytest.mark.parametrize(
        ("name", "value", "expected"),
        [
            ("count", 1e5, 100_000),
            ("count", np.float64(3.0), 3),
            ("count", np.int64(3), 3),
            ("rate", 1, 1.0),
            ("rate", np.float32(0.5), 0.5),
            ("flag", True, True),
            ("path", None, None),
            ("path", "a/b", Path("a/b")),
            ("path", Path("a"), Path("a")),
            ("limit", None, None),
            ("limit", 2.0, 2),
            ("mode", "off", "off"),
            ("sizes", [3, 4.0], (3, 4)),
            ("sizes", [], ()),
            ("pair", [1, 2.0], (1.0, 2)),
            ("knots", [[0, 1], [1e4, 0.05]], ((0.0, 1.0), (10_000.0, 0.05))),
            ("more", {"a": 1}, {"a": 1}),
            ("inner", {"size": 7.0}, Inner(size=7)),
            ("inner", Inner(size=8), Inner(size=8)),
            ("anything", {1, 2}, {1, 2}),
        ],
    )
    def test_converts_where_nothing_is_lost(self, name: str, value: Any, expected: Any) -> None:
        got = getattr(Outer.make({name: value}), name)
        assert got == expected
        assert type(got) is type(expected)

    def test_a_large_integer_keeps_every_digit(self) -> None:
        @dataclass(frozen=True, kw_only=True)
        class Seeded(Settings):
            seed: int = 0

        assert Seeded(seed=2**53 + 1).seed == 2**53 + 1

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("count", 1.5, "outer.count=1.5: an integer is needed"),
            ("count", "3", "outer.count='3': an integer is needed"),
            ("count", True, "outer.count=True: an integer is needed"),
            ("count", None, "outer.count=None: an integer is needed"),
            ("count", math.nan, "outer.count=nan: an integer is needed"),
            ("count", math.inf, "outer.count=inf: an integer is needed"),
            ("rate", "fast", "outer.rate='fast': a number is needed"),
            ("rate", False, "outer.rate=False: a number is needed"),
            ("rate", [0.1], r"outer.rate=\[0.1\]: a number is needed"),
            ("flag", 1, "outer.flag=1: true or false is needed"),
            ("flag", "yes", "outer.flag='yes': true or false is needed"),
            ("name", 1, "outer.name=1: a text is needed"),
            ("path", 1, "outer.path=1: Path is needed"),
            ("limit", "none", "outer.limit='none': an integer is needed"),
            ("mode", "on", "outer.mode='on': must be one of auto, off"),
            ("mode", False, "outer.mode=False: must be one of auto, off"),
            ("mode", [], r"outer.mode=\[\]: must be one of"),
            ("sizes", 3, "outer.sizes=3: a list is needed"),
            ("sizes", "12", "outer.sizes='12': a list is needed"),
            ("sizes", [1, "2"], "outer.sizes='2': an integer is needed"),
            ("pair", [1.0], r"outer.pair=\[1.0\]: exactly 2 values are needed"),
            ("knots", [[0, 1, 2]], r"outer.knots=\[0, 1, 2\]: exactly 2 values are needed"),
            ("more", [1], r"outer.more=\[1\]: a mapping is needed"),
            ("inner", 5, "outer.inner=5: a mapping is needed"),
            ("inner", None, "outer.inner=None: a mapping is needed"),
            ("inner", "size", "outer.inner='size': a mapping is needed"),
            ("inner", {"size": 0}, "outer.inner.size=0: must be at least 1"),
            ("inner", {"sizes": 1}, "outer.inner.sizes: there is no such setting; did you mean "),
        ],
    )
    def test_refuses_the_rest_and_says_what_is_needed(
        self, name: str, value: Any, message: str
    ) -> None:
        with pytest.raises(SettingError, match=f"^{message}"):
            Outer.make({name: value})
        with pytest.raises(SettingError, match=f"^{message}"):
            Outer(**{name: value})

    @pytest.mark.parametrize("name", ["count", "rate"])
    def test_a_number_beyond_every_float_is_refused_in_words(self, name: str) -> None:
        with pytest.raises(SettingError, match=f"outer.{name}=1000"):
            Outer.make({name: 10**400})

    def test_settings_do_not_change(self) -> None:
        with pytest.raises(FrozenInstanceError):
            Outer().count = 2  # type: ignore[misc]

    def test_mappings_are_copied(self) -> None:
        given = {"a": 1}
        settings = Outer(more=given)
        given["a"] = 2
        assert settings.more == {"a": 1}
        assert Outer().more is not Outer().more


class TestBounds:
    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("count", -1, "outer.count=-1: must be at least 0 and less than 1e+06"),
            ("count", 10**6, "outer.count=1000000: must be at least 0 and less than 1e+06"),
            ("rate", 0, "outer.rate=0.0: must be greater than 0 and at most 1"),
            ("rate", 1.01, "outer.rate=1.01: must be greater than 0 and at most 1"),
            ("rate", math.nan, "outer.rate=nan: must be greater than 0 and at most 1"),
            ("limit", 0, "outer.limit=0: must be at least 1"),
            ("sizes", [1, 0], "outer.sizes=0: must be at least 1"),
            ("knots", [[0, 1], [1, -0.5]], "outer.knots=-0.5: must be at least 0"),
        ],
    )
    def test_outside(self, name: str, value: Any, message: str) -> None:
        with pytest.raises(SettingError) as caught:
            Outer.make({name: value})
        assert str(caught.value) == message

    @pytest.mark.parametrize(
        ("name", "value"), [("count", 0), ("count", 10**6 - 1), ("rate", 1), ("rate", 5e-324)]
    )
    def test_on_the_edge(self, name: str, value: float) -> None:
        assert getattr(Outer.make({name: value}), name) == value

    def test_defaults_are_checked_too(self) -> None:
        @dataclass(frozen=True, kw_only=True)
        class Wrong(Settings):
            size: int = setting(0, low=1)

        with pytest.raises(SettingError, match=r"^size=0: must be at least 1$"):
            Wrong()

    def test_check_sees_converted_values(self) -> None:
        @dataclass(frozen=True, kw_only=True)
        class Ordered(Settings):
            pair: tuple[int, ...] = (1, 2)

            def check(self) -> None:
                assert isinstance(self.pair, tuple)
                if self.pair[0] >= self.pair[1]:
                    raise SettingError("pair: unordered")

        assert Ordered(pair=[3, 4]).pair == (3, 4)  # type: ignore[arg-type]
        with pytest.raises(SettingError, match="unordered"):
            Ordered(pair=(2, 1))


class TestUnknownKey:
    def test_names_the_nearest(self) -> None:
        with pytest.raises(SettingError, match=r"^outer.coumt: there is no such .* outer.count?"):
            Outer.make({"coumt": 1})

    def test_or_the_neighbours(self) -> None:
        text = unknown_key("a.zzzzzz", ["a.two", "a.one", "b.three"])
        assert text == "a.zzzzzz: there is no such setting; there are: a.one, a.two"

    def test_or_everything(self) -> None:
        assert unknown_key("zzz", ["b.x", "a.x"]).endswith("there are: a.x, b.x")

    def test_a_key_that_is_no_text(self) -> None:
        with pytest.raises(SettingError, match=r"outer.1: there is no such setting"):
            Outer.make({1: 2})  # type: ignore[dict-item]


class TestResolve:
    def test_inside_the_package(self) -> None:
        assert resolve("actorlearner.config:resolve") is resolve

    @pytest.mark.parametrize("target", ["", ":", "os", "os:", ":getcwd", "actorlearner.config"])
    def test_must_read_module_and_name(self, target: str) -> None:
        with pytest.raises(SettingError, match=r"must read package.module:Name"):
            resolve(target, ["os"])

    def test_another_package_needs_trust(self) -> None:
        message = r"target='os.path:join': os is not trusted; add trust=\[os\] if you trust it"
        with pytest.raises(SettingError, match=message):
            resolve("os.path:join")
        with pytest.raises(SettingError, match="not trusted"):
            resolve("os.path:join", ["posixpath", "os.path"])
        assert resolve("os.path:join", ["os"]) is __import__("os").path.join

    def test_an_untrusted_module_is_not_even_imported(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "untrusted_module.py").write_text("raise RuntimeError('imported')")
        monkeypatch.syspath_prepend(str(tmp_path))
        with pytest.raises(SettingError, match="not trusted"):
            resolve("untrusted_module:Thing")
        # A package whose name begins like a trusted one is another package.
        with pytest.raises(SettingError, match="not trusted"):
            resolve("actorlearner_evil:Thing")

    def test_a_missing_module_or_name(self) -> None:
        with pytest.raises(SettingError, match=r"No module named 'actorlearner.nothing'"):
            resolve("actorlearner.nothing:Thing")
        with pytest.raises(SettingError, match="has no attribute 'Nothing'"):
            resolve("actorlearner.config:Nothing")

    def test_an_installed_entry_point_is_trusted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "plugged_in.py").write_text("class Agent: pass\nclass Other: pass\n")
        info = tmp_path / "plugged_in-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged-in\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[actorlearner]\nmine = plugged_in:Agent\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        assert resolve("plugged_in:Agent").__name__ == "Agent"
        with pytest.raises(SettingError, match="not trusted"):
            resolve("plugged_in:Other")
        monkeypatch.delitem(sys.modules, "plugged_in")


def test_config_dir_holds_the_root_config() -> None:
    assert (config_dir() / "config.yaml").is_file()
