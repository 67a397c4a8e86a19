"""`kvplan.llm_datadist.install()`: explicit, visible, undoable; nothing is shadowed without it."""

from __future__ import annotations

from tests.run.programs import ROOT, Folder, Outcome

OURS = ROOT / "kvplan" / "llm_datadist"


def run(folder: Folder, program: str, *, official: bool = False) -> str:
    """Run a program with python itself, with or without an installed official package."""
    done = attempt(folder, program, official=official)
    assert (done.stderr, done.code) == ("", 0)
    return done.stdout


def attempt(folder: Folder, program: str, *, official: bool = False) -> Outcome:
    folder.write("elsewhere/program.py", program)
    path = [folder.official()] if official else []
    return folder.python("elsewhere/program.py", path=path)


def test_importing_kvplan_shadows_nothing(folder: Folder) -> None:
    said = run(
        folder,
        """
        import kvplan, kvplan.llm_datadist, kvplan.llm_datadist.v2
        import llm_datadist, llm_datadist.v2, llm_datadist_v1
        print(llm_datadist.WHO, llm_datadist.v2.WHO, llm_datadist_v1.WHO, sep=", ")
        print(kvplan.llm_datadist.in_use())
        """,
        official=True,
    )
    names = "official llm_datadist, official llm_datadist/v2, official llm_datadist_v1"
    official = folder.path / "site" / "llm_datadist" / "__init__.py"
    assert said == (
        f"{names}\n"
        f"llm_datadist is {official}, already imported; kvplan's, {OURS}, is kvplan.llm_datadist\n"
    )


def test_importing_kvplan_makes_no_llm_datadist(folder: Folder) -> None:
    said = run(
        folder,
        """
        from kvplan import llm_datadist as ours
        try:
            import llm_datadist
        except ModuleNotFoundError as error:
            print(error.name, ours.installed())
        print(ours.in_use())
        """,
    )
    assert said == (
        "llm_datadist False\n"
        "llm_datadist is not importable; "
        f"kvplan's, {OURS}, is kvplan.llm_datadist\n"
    )


def test_after_install_every_path_is_the_same_module(folder: Folder) -> None:
    said = run(
        folder,
        """
        import importlib, pkgutil, sys
        import kvplan.llm_datadist as ours

        ours.install()
        ours.install()  # a second time: nothing
        names = [it.name for it in pkgutil.walk_packages(ours.__path__, "llm_datadist.")]
        for name in {*names, "llm_datadist", "llm_datadist.v2"} - {"llm_datadist.v1"}:
            module = importlib.import_module(name)
            assert module is sys.modules["kvplan." + name], name
            assert module.__spec__.name == module.__name__ == "kvplan." + name
            assert module.__loader__ is module.__spec__.loader
        print(len(names) > 10, ours.installed(), sum("Finder" in repr(it) for it in sys.meta_path))
        aliases = {it for it in sys.modules if it.startswith("llm_datadist")}
        print({"kvplan." + it for it in aliases} <= set(sys.modules))
        """,
    )
    assert said.splitlines()[0].startswith("True True")
    assert said.splitlines()[1] == "True"


def test_classes_are_the_same_by_every_name(folder: Folder) -> None:
    said = run(
        folder,
        """
        import pickle
        from kvplan import llm_datadist as ours
        from kvplan.llm_datadist.v2.llm_types import CacheKey as by_kvplan
        ours.install()
        from llm_datadist import CacheKey
        from llm_datadist.v2.llm_types import CacheKey as by_path
        assert CacheKey is by_path is by_kvplan is ours.CacheKey
        pickled = pickle.dumps(CacheKey(1, 2))
        ours.uninstall()
        key = pickle.loads(pickled)
        print(type(key) is CacheKey, repr(key) == repr(CacheKey(1, 2)))
        """,
    )
    assert said == "True True\n"


def test_version_1_is_refused_under_every_name(folder: Folder) -> None:
    said = run(
        folder,
        """
        from importlib import import_module
        from kvplan import llm_datadist as ours
        ours.install(quiet=True)
        for name in ("kvplan.llm_datadist.v1", "llm_datadist.v1", "llm_datadist_v1",
                     "llm_datadist_v1.llm_types"):
            try:
                import_module(name)
            except ImportError as error:
                print("llm.EnableCacheManager" in str(error))
        import llm_datadist
        print(not hasattr(llm_datadist, "KvCacheManager"))  # a program asks so for version 1
        """,
        official=True,
    )
    assert said == "True\n" * 5


def test_pickles_of_the_official_package_are_read(folder: Folder) -> None:
    """Pickles name modules of the official package, which are kvplan's then."""
    said = run(
        folder,
        """
        import pickle
        from kvplan import llm_datadist as ours
        ours.install()
        pickled = b"cllm_datadist.v2.llm_types\\nPlacement\\n(I1\\ntR."
        print(pickle.loads(pickled) is ours.Placement.DEVICE)
        """,
    )
    assert said == "True\n"


def test_missing_modules_are_not_found(folder: Folder) -> None:
    said = run(
        folder,
        """
        from importlib import import_module, reload
        from importlib.util import find_spec
        from kvplan import llm_datadist as ours
        ours.install()
        print(find_spec("llm_datadist").origin == ours.__file__, find_spec("llm_datadist.missing"))
        import llm_datadist.configs
        for name in ("llm_datadist.missing", "llm_datadist.missing.x", "llm_datadist.configs.x"):
            try:
                import_module(name)
            except ModuleNotFoundError as error:
                print(error.name)
        print(reload(llm_datadist.configs) is ours.configs)
        """,
    )
    assert said == (
        "True None\nllm_datadist.missing\nllm_datadist.missing\nllm_datadist.configs.x\nTrue\n"
    )


def test_an_imported_official_package_is_in_use_and_stays_so(folder: Folder) -> None:
    done = attempt(
        folder,
        """
        import llm_datadist
        from kvplan import llm_datadist as ours
        try:
            ours.install()
        except ImportError as error:
            print(error, error.name, error.path == llm_datadist.__file__)
        import llm_datadist.v2
        print(llm_datadist.v2.WHO, ours.installed())
        """,
        official=True,
    )
    official = folder.path / "site" / "llm_datadist" / "__init__.py"
    assert (done.stderr, done.code) == ("", 0)
    assert done.stdout == (
        f"llm_datadist is already imported, from {official}; call kvplan.llm_datadist.install() "
        "before anything imports it llm_datadist True\n"
        "official llm_datadist/v2 False\n"
    )


def test_an_official_package_that_could_be_imported_is_named(folder: Folder) -> None:
    said = run(
        folder,
        """
        import logging, sys
        from kvplan import llm_datadist as ours
        logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(name)s %(message)s")
        print(ours.in_use())
        ours.install()
        import llm_datadist
        assert llm_datadist is ours
        print(ours.in_use())
        ours.uninstall()
        import llm_datadist, llm_datadist_v1
        print(llm_datadist.WHO, llm_datadist_v1.WHO, sep=", ")
        """,
        official=True,
    )
    official = folder.path / "site" / "llm_datadist" / "__init__.py"
    using = f"llm_datadist is kvplan's, {OURS}; {official} could be imported too, and is not used"
    assert said.splitlines() == [
        f"llm_datadist is {official}; kvplan's, {OURS}, is kvplan.llm_datadist",
        f"WARNING kvplan {using}",
        using,
        "official llm_datadist, official llm_datadist_v1",
    ]


def test_without_an_official_package_no_warning_is_printed(folder: Folder) -> None:
    said = run(
        folder,
        """
        import logging, sys
        from kvplan import llm_datadist as ours
        logging.basicConfig(stream=sys.stdout, level=0)
        ours.install()
        print(ours.in_use())
        """,
    )
    assert said == f"llm_datadist is kvplan's, {OURS}\n"


def test_the_launcher_installs_at_the_first_import(folder: Folder) -> None:
    program = """
        import kvplan.llm_datadist as ours
        for _ in range(2):
            print(ours.installed(), ours.in_use())
            import llm_datadist
            ours.install()
        """
    said = f"llm_datadist is kvplan's, {OURS}\n"
    assert folder.run(program) == f"False {said}True {said}"


def test_threads_import_at_once(folder: Folder) -> None:
    said = folder.run(
        """
        import sys
        from concurrent.futures import ThreadPoolExecutor
        from importlib import import_module
        sys.setswitchinterval(1e-5)
        names = ["llm_datadist", "llm_datadist.configs", "llm_datadist.status"]
        with ThreadPoolExecutor(16) as pool:
            modules = list(pool.map(import_module, names * 8))
        import kvplan.llm_datadist as it
        assert modules == [it, it.configs, it.status] * 8
        print({it.__spec__.name for it in modules} == {it.__name__ for it in modules})
        """
    )
    assert said == "True\n"
