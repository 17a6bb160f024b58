"""scripts/release in a small project, in which stubs stand for what builds."""

import json
import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "release"
CHANGELOG = """# Changelog

## Unreleased

- Comes later.

## 1.2.3 (2026-01-02)

### Memory

- Takes less.

## 1.2.2

- Was before.
"""
FILES = {
    "Cargo.toml": '[workspace.package]\nversion = "1.2.3"\n\n[workspace.dependencies]\nx = "9"\n',
    "CHANGELOG.md": CHANGELOG,
    "Makefile": "programs:\n\t@echo building\n",
    ".gitignore": "/dist\n/key*\n",
    "deploy/release/allowed_signers": "# nobody\n",
    "bin/ebb/Cargo.toml": "",
    "bin/ebbd/Cargo.toml": "",
    # Builds the package, and whatever the test wants.
    "scripts/deb": "#!/bin/sh\nmkdir -p dist/built && echo package >dist/built/ebb_1.2.3-1_amd64.deb\n"
    "echo $PWD/dist/built/ebb_1.2.3-1_amd64.deb\n[ -z $SPOIL ] || echo >>$SPOIL\n",
    "scripts/cargo-tool": "#!/bin/sh\necho $PWD/scripts\n",
    # Writes beside each Cargo.toml, as the tool does, and names the path.
    "scripts/cargo-cyclonedx": "#!/bin/sh\nfor program in ebb ebbd; do\n"
    '    echo "{\\"ref\\": \\"path+file://$PWD/bin/$program#1.2.3\\"}" >bin/$program/$program.cdx.json\n'
    "done\n",
}


class Release(unittest.TestCase):
    """Each test has a project of its own, all of which is committed."""

    def setUp(self):
        if missing := [name for name in ("git", "make", "ssh-keygen") if not shutil.which(name)]:
            self.skipTest(f"no {', '.join(missing)}")
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        # The copied script names its files by their real path.
        self.project = Path(place.name).resolve()
        for name, text in FILES.items():
            self.write(name, text)
        shutil.copy(SCRIPT, self.project / "scripts/release")
        for path in (self.project / "scripts").iterdir():
            path.chmod(0o755)
        self.git("init", "--quiet")
        self.commit()

    def write(self, name, text):
        path = self.project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def git(self, *words):
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *who, *words], cwd=self.project, check=True)

    def commit(self):
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "x")

    def key(self, name="key", signs=True):
        """Makes a key, and allows it to sign."""
        key = self.project / name
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "x", "-f", key]
        subprocess.run(make, check=True)
        if signs:
            public = (self.project / f"{name}.pub").read_text()
            line = f'ebb-release namespaces="ebb-release" {public}'
            self.write("deploy/release/allowed_signers", f"# somebody\n{line}")
            self.commit()
        return str(key)

    def run_release(self, *words, key=None, spoil=""):
        environment = {name: os.environ[name] for name in os.environ if name != "EBB_RELEASE_KEY"}
        if key:
            environment["EBB_RELEASE_KEY"] = key
        return subprocess.run(
            [self.project / "scripts/release", *words],
            env={**environment, "SPOIL": spoil},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )

    def assert_refuses(self, says, *words, **settings):
        """It says why in one line, and builds nothing."""
        ran = self.run_release(*words, **settings)
        self.assertEqual(ran.returncode, 1, ran)
        self.assertEqual(ran.stdout, "")
        self.assertEqual(len(ran.stderr.splitlines()), 1, ran.stderr)
        self.assertIn(says, ran.stderr)
        self.assertFalse((self.project / "dist/built").exists())

    def release(self):
        ran = self.run_release(key=self.key())
        self.assertEqual(ran.returncode, 0, ran.stderr)
        return self.project / "dist/1.2.3"

    def test_what_makes_no_release_is_refused(self):
        for version in ("1.2", "v1.2.3", "1.2.3-rc1", "01.2.3", "../x"):
            self.assert_refuses("is no version", version)
        self.assert_refuses("Cargo.toml has version 1.2.3, not 1.2.4", "1.2.4")
        self.assert_refuses("give one version", "1.2.3", "1.2.4")
        self.assert_refuses("there is no file", key="absent")

    def test_changes_that_are_not_committed_are_refused(self):
        self.write("new", "")
        self.assert_refuses("commit or remove it (new)")
        self.commit()
        self.write("Makefile", "")
        self.assert_refuses("commit or remove it (Makefile)", "1.2.3")

    def test_a_version_without_notes_is_refused(self):
        for section in ("", "## 1.2.30\n\n- Other.\n", "## 1.2.3\n\n## 1.2.2\n\n- Before.\n"):
            self.write("CHANGELOG.md", f"# Changelog\n\n{section}")
            self.commit()
            self.assert_refuses('CHANGELOG.md says nothing below "## 1.2.3"')

    def test_without_a_key_all_is_there_but_the_signature(self):
        ran = self.run_release("1.2.3")
        self.assertEqual(ran.returncode, 3, ran)
        self.assertIn("dist/1.2.3 is unsigned", ran.stderr.splitlines()[-1])
        place = self.project / "dist/1.2.3"
        found = sorted(path.name for path in place.iterdir())
        files = ["ebb-1.2.3.cdx.json", "ebb_1.2.3-1_amd64.deb", "ebbd-1.2.3.cdx.json", "notes.md"]
        self.assertEqual(found, ["SHA256SUMS", *files])
        self.assertEqual((place / "notes.md").read_text(), "### Memory\n\n- Takes less.\n\n")
        materials = json.loads((place / "ebb-1.2.3.cdx.json").read_text())
        self.assertEqual(materials, {"ref": "path+file:///ebb/bin/ebb#1.2.3"})
        sums = (place / "SHA256SUMS").read_text().splitlines()
        self.assertEqual([line.split("  ")[1] for line in sums], files)
        subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=place, check=True)
        self.assert_check_fails("this release is unsigned", place)

    def test_a_build_that_changes_the_sources_makes_no_release(self):
        ran = self.run_release(spoil="Cargo.toml")
        self.assertEqual(ran.returncode, 1, ran)
        self.assertIn("the build has changed what is checked out", ran.stderr)
        self.assertFalse((self.project / "dist/1.2.3/SHA256SUMS").exists())

    def test_a_signed_release_is_verified_and_kept(self):
        place = self.release()
        ran = self.run_release("--check", str(place))
        self.assertEqual(ran.returncode, 0, ran.stderr)
        self.assertIn("the signature and 4 checksums are right", ran.stdout)
        self.assertIn("signed already", self.run_release(key=str(self.project / "key")).stderr)

    def test_an_unsigned_release_is_signed_later(self):
        key = self.key()
        self.assertEqual(self.run_release().returncode, 3)
        place = self.project / "dist/1.2.3"
        sign = ["ssh-keygen", "-q", "-Y", "sign", "-n", "ebb-release", "-f", key, "SHA256SUMS"]
        subprocess.run(sign, cwd=place, check=True)
        self.assertEqual(self.run_release("--check", str(place)).returncode, 0)

    def test_what_was_changed_after_signing_is_found(self):
        place = self.release()
        notes = (place / "notes.md").read_text()
        self.write("dist/1.2.3/notes.md", "other")
        self.assert_check_fails("not what was signed in", place, "notes.md")
        (place / "notes.md").unlink()
        self.assert_check_fails("not what was signed in", place, "notes.md")
        self.write("dist/1.2.3/notes.md", notes)
        self.write("dist/1.2.3/more", "")
        self.assert_check_fails("not what was signed in", place, "more")
        (place / "more").unlink()
        with (place / "SHA256SUMS").open("a") as sums:
            sums.write("\n")
        self.assert_check_fails("no key of deploy/release/allowed_signers has signed", place)

    def test_a_signature_of_another_key_is_none(self):
        place = self.release()
        self.key("key2", signs=True)
        self.assert_check_fails("no key of deploy/release/allowed_signers has signed", place)
        self.write("deploy/release/allowed_signers", "# nobody\n")
        self.assert_check_fails("has no key", place)

    def test_a_key_that_nobody_could_verify_signs_nothing(self):
        self.key()
        ran = self.run_release(key=self.key("key2", signs=False))
        self.assertEqual(ran.returncode, 1, ran)
        self.assertIn("no key of deploy/release/allowed_signers has signed", ran.stderr)
        self.assertTrue((self.project / "dist/1.2.3/SHA256SUMS").exists())
        self.assertFalse((self.project / "dist/1.2.3/SHA256SUMS.sig").exists())

    def assert_check_fails(self, says, place, *names):
        ran = self.run_release("--check", str(place))
        self.assertEqual(ran.returncode, 1, ran)
        self.assertEqual(len(ran.stderr.splitlines()), 1, ran.stderr)
        for part in (says, *names):
            self.assertIn(part, ran.stderr)


if __name__ == "__main__":
    unittest.main()
