"""Shell completions: what bash completes, and that the other shells' scripts name the same."""

import shutil
import subprocess

import pytest

from chairlift.cli import main

COMPLETE = """
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_chairlift
echo "${COMPREPLY[@]}"
"""


@pytest.fixture
def script(capsys):
    def printed(shell):
        assert main.main(["completion", shell]) == 0
        return capsys.readouterr().out

    return printed


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("se", "serve"),
        ("bench th", "throughput"),
        ("bench serve --request-r", "--request-rate"),
        ("serve some-model --kv-cache-d", "--kv-cache-dtype"),
        ("serve --kv-cache-dtype f", "float32 float16 fp8"),
        ("serve --no-public", "--no-public-metrics"),
        ("completion ", "bash zsh fish -h --help"),
        # Nothing: bash then completes names of files.
        ("serve ", ""),
        ("serve --config ", ""),
    ],
)
def test_bash_completes_commands_flags_and_values(script, line, words):
    command = [shutil.which("bash"), "-c", script("bash") + COMPLETE, "bash", "chairlift", *line.split(" ")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == (words, "")


def test_zsh_runs_the_script_of_bash(script):
    assert script("zsh").endswith(script("bash"))


def test_fish_names_every_command_and_flag(script, capsys):
    lines = script("fish").splitlines()
    assert "complete -c chairlift -n __chairlift_command -f -a serve -d 'serve a model over HTTP with OpenAI'\"'\"'s API'" in lines
    assert "complete -c chairlift -n '__chairlift_command serve' -l dtype -x -a 'auto float32 float16 bfloat16'" in lines
    assert "complete -c chairlift -n '__chairlift_command serve' -l config -r" in lines
    assert "complete -c chairlift -n '__chairlift_command bench sweep' -l start-rate -r" in lines


def test_an_unknown_shell_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as left:
        main.main(["completion", "tcsh"])
    assert left.value.code == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
