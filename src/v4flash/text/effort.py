"""Which chat encoding a checkpoint speaks, and the words that its thinking efforts are asked for with.

Knows: the three published encodings by name, where a checkpoint keeps their effort texts, and how each
names its levels. Does not know: how messages are framed (`chat`).

The effort texts are data of a checkpoint, so none is written here. They are read, in this order, from
`chat_encoding.json` (this project's format, docs/chat-encoding.md) or from the constants of the encoder
that the authors ship as `encoding/*.py`; that file is parsed for its literals and never executed. Source of
the ladders: DeepSeek's encoders for V4 (preview and 0731) and V4.1.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from v4flash.errors import CheckpointError, UsageError

V4_PREVIEW = "v4-preview"
V4_0731 = "v4-0731"
V4_1 = "v4.1"
ENCODINGS = (V4_PREVIEW, V4_0731, V4_1)

FILE_NAME = "chat_encoding.json"
FILE_FORMAT = 1
BUDGET_FIELD = "{budget}"
BUDGETS = range(1, 101)

_LEVEL_NAMES = {
    V4_PREVIEW: ("high", "max"),
    V4_0731: ("low", "high", "max"),
    V4_1: ("low", "medium", "high", "xhigh", "max"),
}
# The levels that need no text: the ones every V4 checkpoint understands without any file.
_SILENT_LEVEL = {V4_PREVIEW: "high", V4_0731: "low"}
_CONSTANT = re.compile(r"_?(REASONING_EFFORT_(?:MAX|PROMPTS|TEMPLATE|MAPPINGS)|DEFAULT_REASONING_EFFORT)")
_MODEL_TYPES = {"deepseek_v4": V4_PREVIEW, "deepseek_v41": V4_1, "deepseek_v41_text": V4_1}


@dataclass(frozen=True)
class EffortLadder:
    """The thinking efforts of one checkpoint.

    `levels` maps a name to its text, or to a budget (1 to 100) that is put into `template` in place of
    `{budget}`. `default` is the level that plain thinking means. `where` names the checkpoint in messages.
    """

    encoding: str
    levels: Mapping[str, str | int] = field(default_factory=dict)
    default: str = "high"
    template: str | None = None
    where: str = "this checkpoint"

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of `--think` that `paragraph` accepts, besides bare budgets."""
        default = ("on",) if self.default in self.levels else ()
        return ("off", *default, *self.levels)

    def paragraph(self, think: str) -> str:
        """The text in front of the conversation for `think`: "on", a level, or a budget written as a number.

        Raises CheckpointError when the encoding knows the level but the checkpoint brings no text for it, and
        UsageError for a level or a budget that the encoding does not know.
        """
        level = self.default if think == "on" else think
        if level in self.levels:
            return self._text(self.levels[level])
        if level.isascii() and level.isdigit() and self.encoding == V4_1:
            if int(level) not in BUDGETS:
                raise UsageError(f"--think {think} is outside the budgets of {V4_1}, which go from 1 to 100")
            if self.template is not None:
                return self._text(int(level))
        elif level not in _LEVEL_NAMES[self.encoding]:
            names = ", ".join(("off", "on", *_LEVEL_NAMES[self.encoding]))
            budgets = ", or a budget from 1 to 100" if self.encoding == V4_1 else ""
            raise UsageError(
                f"--think {think} is not an effort of the {self.encoding} encoding;"
                f" use one of {names}{budgets}"
            )
        raise CheckpointError(
            f"--think {think} needs the effort text of {self.encoding}, and {self.where} has none: expected"
            f" {FILE_NAME}, or the authors' encoding/*.py, beside config.json; copy one of them there, or use"
            f" one of: --think {', '.join(self.choices)}"
        )

    def _text(self, value: str | int) -> str:
        if isinstance(value, str):
            return value
        # Readers of the files below refuse numbers without a template.
        return (self.template or BUDGET_FIELD).replace(BUDGET_FIELD, str(value))


def find_ladder(
    directory: str | Path, model_type: str, override: str | None = None
) -> tuple[EffortLadder, str]:
    """The ladder of the checkpoint in `directory`, and in words what its encoding was chosen by.

    `override` names an encoding and beats the files; texts found for another encoding are then left unused.
    Raises UsageError for an unknown override, CheckpointError for a damaged file or an unknown
    `model_type`.
    """
    directory = Path(directory)
    if override is not None and override not in ENCODINGS:
        raise UsageError(f"--encoding {override} is unknown; use one of {', '.join(ENCODINGS)}")
    found = _from_json(directory) or _from_encoder(directory)
    if found is not None and override in (None, found[0].encoding):
        return found
    if override is not None:
        return _bare(override, directory), "--encoding"
    if model_type not in _MODEL_TYPES:
        raise CheckpointError(
            f"no chat encoding is known for model_type {model_type!r} of {directory}; expected"
            f" {', '.join(_MODEL_TYPES)}, or give --encoding"
        )
    return _bare(_MODEL_TYPES[model_type], directory), f"model_type {model_type}"


def _bare(encoding: str, directory: Path) -> EffortLadder:
    silent = _SILENT_LEVEL.get(encoding)
    levels = {} if silent is None else {silent: ""}
    return EffortLadder(encoding, levels, silent or "high", None, str(directory))


def _from_json(directory: Path) -> tuple[EffortLadder, str] | None:
    file = directory / FILE_NAME
    if not file.is_file():
        return None

    def refuse(expected: str, value: object) -> CheckpointError:
        return CheckpointError(f"{file}: expected {expected}, found {value!r}; see docs/chat-encoding.md")

    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON ({error}); see docs/chat-encoding.md") from None
    if not isinstance(data, dict) or data.get("format") != FILE_FORMAT:
        raise refuse(
            f'an object with "format": {FILE_FORMAT}',
            data if not isinstance(data, dict) else data.get("format"),
        )
    encoding = data.get("encoding")
    if encoding not in ENCODINGS:
        raise refuse(f'"encoding" to be one of {", ".join(ENCODINGS)}', encoding)
    effort = data.get("effort", {})
    if not isinstance(effort, dict) or not isinstance(effort.get("levels", {}), dict):
        raise refuse('"effort" to be an object with an object "levels"', effort)
    return _ladder(encoding, effort, directory, refuse), FILE_NAME


def _ladder(
    encoding: str, effort: dict, directory: Path, refuse: Callable[[str, object], CheckpointError]
) -> EffortLadder:
    bare = _bare(encoding, directory)
    template = effort.get("template")
    if template is not None and (not isinstance(template, str) or BUDGET_FIELD not in template):
        raise refuse(f"the effort template to be text with {BUDGET_FIELD}", template)
    levels = {**bare.levels, **effort.get("levels", {})}
    for name, value in levels.items():
        number = type(value) is int and value in BUDGETS and template is not None
        if not isinstance(value, str) and not number:
            raise refuse(
                f"effort level {name!r} to be text, or a budget from 1 to 100 with a template", value
            )
    default = effort.get("default", bare.default)
    if levels and (not isinstance(default, str) or default not in levels):
        raise refuse(f"the default effort to be one of {', '.join(levels)}", default)
    return EffortLadder(encoding, levels, default, template, str(directory))


def _from_encoder(directory: Path) -> tuple[EffortLadder, str] | None:
    """Read the effort constants of the authors' encoder; None where no file under encoding/ has any."""
    for file in sorted((directory / "encoding").glob("*.py")):
        constants = _constants(file)
        if not constants:
            continue

        def refuse(expected: str, value: object, file: Path = file) -> CheckpointError:
            return CheckpointError(
                f"{file}: expected {expected}, found {value!r}; write {FILE_NAME} beside config.json instead"
            )

        default = constants.get("DEFAULT_REASONING_EFFORT")
        effort = {} if default is None else {"default": default}
        if "REASONING_EFFORT_TEMPLATE" in constants:
            encoding = V4_1
            effort["template"] = constants["REASONING_EFFORT_TEMPLATE"]
            effort["levels"] = constants.get("REASONING_EFFORT_MAPPINGS", {})
        elif "REASONING_EFFORT_PROMPTS" in constants:
            encoding = V4_0731
            effort["levels"] = constants["REASONING_EFFORT_PROMPTS"]
        elif "REASONING_EFFORT_MAX" in constants:
            encoding = V4_PREVIEW
            effort["levels"] = {"max": constants["REASONING_EFFORT_MAX"]}
        else:
            continue
        if not isinstance(effort["levels"], dict):
            raise refuse("the effort levels to be a dictionary", effort["levels"])
        return _ladder(encoding, effort, directory, refuse), f"encoding/{file.name}"
    return None


def _constants(file: Path) -> dict[str, object]:
    """Top-level literals of `file` whose names speak of reasoning effort, without a leading underscore."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError) as error:
        raise CheckpointError(
            f"{file} cannot be read as Python ({error}); copy it again, or write"
            f" {FILE_NAME} beside config.json"
        ) from None
    constants: dict[str, object] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            match = _CONSTANT.fullmatch(target.id) if isinstance(target, ast.Name) else None
            if match is None or getattr(node, "value", None) is None:
                continue
            try:
                constants[match[1]] = ast.literal_eval(node.value)
            except ValueError:
                raise CheckpointError(
                    f"{file}: {target.id} is not a plain literal, so its text cannot be read without running"
                    f" the file; write {FILE_NAME} beside config.json instead"
                ) from None
    return constants
