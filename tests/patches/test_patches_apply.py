"""The diffs of ``patches/`` fit the installed SGLang: each alone, and all in their order."""

from __future__ import annotations

import py_compile
import re

import pytest

from tests.patches import patched_tree

pytestmark = pytest.mark.skipif(patched_tree.why_not() is not None, reason=str(patched_tree.why_not()))
each_patch = pytest.mark.parametrize("patch", patched_tree.PATCHES, ids=patched_tree.slug)


def compile_all(folder) -> None:
    for path in sorted(folder.rglob("*.py")):
        py_compile.compile(str(path), cfile=str(path) + "c", doraise=True)


@each_patch
def test_applies_alone_and_compiles(patch, tmp_path):
    patched_tree.copies([patch], tmp_path)
    said = patched_tree.apply(patch, tmp_path)
    assert "offset" not in said
    assert said.count("patching file") == len(patched_tree.touched(patch)) > 0
    compile_all(tmp_path)


def test_all_apply_in_their_order(tmp_path):
    patched_tree.copies(patched_tree.PATCHES, tmp_path)
    for patch in patched_tree.PATCHES:
        patched_tree.apply(patch, tmp_path)
    compile_all(tmp_path)


@each_patch
def test_reads_as_a_mail_that_git_takes(patch):
    head, _, changes = patch.read_text().partition("\n---\n")
    subject = re.search(r"^Subject: \[PATCH\] (.+)$", head, re.MULTILINE)
    assert head.startswith("From ")
    assert subject is not None
    assert len(subject[1]) <= 72
    body = head.partition("\n\n")[2]
    assert len(body) > 200  # an argument, not a title
    assert max(map(len, body.splitlines())) <= 75
    assert len(re.findall(r"^diff --git a/(\S+) b/\1$", changes, re.MULTILINE)) == len(patched_tree.touched(patch))
    # Black's width, which upstream's formatter checks.
    added = [line[1:] for line in changes.splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert not [line for line in added if len(line) > 88 or line != line.rstrip()]


def test_a_diff_that_no_longer_fits_is_noticed(tmp_path):
    patch = patched_tree.PATCHES[0]
    patched_tree.copies([patch], tmp_path)
    path = tmp_path / patched_tree.touched(patch)[0]
    path.write_text(path.read_text().replace("Conservative default", "Careful default"))
    with pytest.raises(AssertionError, match="FAILED"):
        patched_tree.apply(patch, tmp_path)
