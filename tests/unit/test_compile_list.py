"""What `scripts/compile.py` compiles must be compilable: no class there may need the interpreter to build it."""

import ast
import runpy

import pytest

from tests.support.served import ROOT

MODULES = runpy.run_path(str(ROOT / "scripts" / "compile.py"))["MODULES"]
FILES = [f"weighbridge/{package}/{name}.py" for package, names in MODULES.items() for name in names.split()]
# msgspec reads annotations at run time and a compiled class has none; a slotted dataclass is a second class; a compiled
# class with an interpreted base keeps its attributes in a dict
INTERPRETED = ("Struct", "dataclass", "asyncio.Protocol", "NamedTuple", "Enum")


@pytest.mark.parametrize("file", FILES)
def test_a_compiled_module_defines_only_plain_classes(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            made_of = [ast.unparse(each) for each in (*node.bases, *node.decorator_list)]
            bad = [each for each in made_of if any(name in each for name in INTERPRETED)]
            assert not bad, f"{file}: class {node.name} needs {bad[0]}: move it to a module that is not compiled"


def test_the_list_names_no_module_twice() -> None:
    assert len(set(FILES)) == len(FILES)
