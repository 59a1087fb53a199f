"""Counting in natural-language text for the IFEval checks: words, sentences, capitals, language.

NLTK and langdetect are used without any downloaded data and are imported on first use, so that
importing the rewards stays cheap. NLTK's trained English sentence model has to be downloaded and is
therefore left out: an untrained Punkt tokenizer takes its place, told the commonest abbreviations
and sentence openers by the two lists below. Results depend on the text alone, on every machine.
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

# An untrained Punkt ends a sentence at every one of these otherwise.
_ABBREVIATIONS = """
    dr mr mrs ms prof rev hon sen rep gov gen col lt sgt capt st jr sr messrs
    vs etc e.g i.e cf al approx est no vol pp fig ed eds dept univ inc ltd co corp bros
    a.m p.m u.s u.k u.n u.s.a d.c ph.d m.d b.a m.a b.c a.d
    jan feb mar apr jun jul aug sep sept oct nov dec mon tue wed thu fri sat ave blvd rd mt ft
"""

# After an abbreviation, one of these with a capital letter does start a sentence.
_SENTENCE_OPENERS = """
    the a an this that these those it he she we they you i in on at by for from with as if when while
    after before since because although however then there here but and so also no yes what who why how
    where my your our their his her its let please
"""

_language_lock = Lock()


def require_packages() -> None:
    """Say at once, not at the first response, that a package is missing.

    Raises:
        ConfigError: NLTK or langdetect is not installed.
    """
    missing = [name for name in ("nltk", "langdetect") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"env.dataset=ifeval needs {' and '.join(missing)}, which this environment lacks; "
            "run: pip install -r requirements_ifeval.txt"
        )


def count_words(text: str) -> int:
    """Number of runs of word characters, the benchmark's notion of a word."""
    return sum(1 for _ in _WORD.finditer(text))


def count_sentences(text: str, stop_at: int) -> int:
    """Number of sentences that Punkt sees in ``text``, counted no further than ``stop_at``.

    Text without a full stop is one sentence. Punkt is slow, so the count ends where it has decided.
    """
    return sum(1 for _ in islice(_sentence_tokenizer().span_tokenize(text), stop_at))


def count_capital_words(text: str, stop_at: int) -> int:
    """Number of tokens in ``text`` without a lower-case letter, counted no further than ``stop_at``.

    Tokens are NLTK's Treebank-style ones, taken sentence by sentence so that a sentence's last full
    stop stands apart from its last word; a lone ``I`` or ``A`` counts.
    """
    tokenizer = _word_tokenizer()
    spans = _sentence_tokenizer().span_tokenize(text)
    tokens = (token for start, end in spans for token in tokenizer.tokenize(text[start:end]))
    return sum(1 for _ in islice((token for token in tokens if token.isupper()), stop_at))


def detect_language(text: str) -> str | None:
    """ISO 639-1 code (``zh-cn`` and ``zh-tw`` for Chinese) of the likeliest language of ``text``.

    Returns:
        The code, or None where the text has no letters to tell a language by.
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

    class Untimed(PunktLanguageVars):
        """NLTK from 3.10 on gives up on a text after five seconds; a verdict must not hang on a clock."""

        def period_context_re(self) -> re.Pattern[str]:
            return re.compile(super().period_context_re().pattern, re.VERBOSE)

    parameters = PunktParameters()
    parameters.abbrev_types.update(_ABBREVIATIONS.split())
    parameters.sent_starters.update(_SENTENCE_OPENERS.split())
    return PunktSentenceTokenizer(parameters, lang_vars=Untimed())


@cache
def _word_tokenizer() -> Any:
    from nltk.tokenize import NLTKWordTokenizer

    return NLTKWordTokenizer()


def _language_profiles() -> Any:
    with _language_lock:  # loading takes most of a second: threads that score at once must not all do it
        return _load_language_profiles()


@cache
def _load_language_profiles() -> Any:
    """A langdetect factory of our own, with its profiles in sorted order and a fixed seed.

    Neither the file system nor anybody else's use of langdetect in this process can change an answer.
    """
    from pathlib import Path

    from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory

    factory = DetectorFactory()
    files = sorted(path for path in Path(PROFILES_DIRECTORY).iterdir() if not path.name.startswith("."))
    factory.load_json_profile([path.read_text(encoding="utf-8") for path in files if path.is_file()])
    factory.set_seed(0)
    return factory
