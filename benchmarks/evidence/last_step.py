"""GSM8K with its written solution up to the last result, so that one calculation is left."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torchrl_grpo.data.gsm8k import HUB
from torchrl_grpo.data.rows import sources

# The solutions of the data set mark each calculation: 48/2 = <<48/2=24>>24.
_MARKED = re.compile(r"<<[^<>\n]*>>")
# Characters of a question with its solution. Short ones take a CPU less time.
_LONGEST = 360


def load(split: str, path: str | None = None) -> Iterator[dict[str, str]]:
    """Yield short problems whose last marked calculation gives the answer.

    Args:
        split: ``train`` or ``test``.
        path: local copy of the data set; None takes the one of the hub.

    Yields:
        ``question``, which ends with the equals sign of the last calculation, and ``answer``, a number.
    """
    source = sources.open_hub(HUB) if path is None else sources.open_path(path, "env.task_args.path")
    for row in source.read(split):
        solution, _, result = row.values["answer"].rpartition("####")
        answer = result.strip().replace(",", "")
        shown, _, rest = solution.rpartition("<<")
        last = re.match(r"[^<>\n]*>>([\d,.]*\d)", rest)
        question = f"{row.values['question']}\n\n{_MARKED.sub('', shown).rstrip(' $')}"
        is_last = last is not None and last[1].replace(",", "") == answer
        if is_last and question.endswith("=") and len(question) <= _LONGEST:
            yield {"question": question, "answer": answer}
