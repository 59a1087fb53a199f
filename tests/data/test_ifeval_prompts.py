"""Composed instruction prompts: complete, without conflicts, and each one can be satisfied."""

from __future__ import annotations

import json
from itertools import cycle, islice
from typing import Any

import pytest

from torchrl_grpo.data.ifeval import Composed, compose, topics
from torchrl_grpo.data.ifeval import conflicts as c
from torchrl_grpo.data.ifeval.schema import clean_truth
from torchrl_grpo.data.ifeval.wordings import WORDINGS
from torchrl_grpo.rewards.ifeval.checks import CHECKS
from torchrl_grpo.rewards.ifeval.scoring import follow_list

# Free of commas and of the letters that a prompt may bound.
FILLER = "The people in the town are happy to share a long and friendly story with us"
SHORT = "the story goes on"

SAMPLES = {
    "ar": "الطقس جميل اليوم ونحن نذهب إلى الحديقة مع الأصدقاء",
    "bg": "Днес времето е много хубаво и ние отиваме в парка с нашите приятели",
    "bn": "আজ আবহাওয়া খুব সুন্দর এবং আমরা বন্ধুদের সাথে পার্কে যাচ্ছি",
    "cs": "Dnes je velmi krásné počasí a půjdeme s přáteli do parku",
    "de": "Heute ist das Wetter sehr schön und wir gehen mit unseren Freunden in den Park",
    "el": "Σήμερα ο καιρός είναι πολύ ωραίος και πηγαίνουμε στο πάρκο με τους φίλους μας",
    "es": "Hoy hace muy buen tiempo y vamos al parque con nuestros amigos",
    "fa": "امروز هوا بسیار زیبا است و ما با دوستان خود به پارک می‌رویم",
    "fi": "Tänään sää on erittäin kaunis ja menemme puistoon ystäviemme kanssa",
    "fr": "Aujourd'hui il fait très beau et nous allons au parc avec nos amis",
    "gu": "આજે હવામાન ખૂબ સરસ છે અને અમે મિત્રો સાથે બગીચામાં જઈએ છીએ",
    "he": "היום מזג האוויר יפה מאוד ואנחנו הולכים לפארק עם החברים שלנו",
    "hi": "आज मौसम बहुत अच्छा है और हम अपने दोस्तों के साथ बगीचे में जा रहे हैं",
    "hu": "Ma nagyon szép az idő és a barátainkkal a parkba megyünk",
    "it": "Oggi il tempo è molto bello e andiamo al parco con i nostri amici",
    "ja": "今日はとても天気がいいので友達と一緒に公園へ行きます",
    "kn": "ಇಂದು ಹವಾಮಾನ ತುಂಬಾ ಚೆನ್ನಾಗಿದೆ ಮತ್ತು ನಾವು ಸ್ನೇಹಿತರೊಂದಿಗೆ ಉದ್ಯಾನಕ್ಕೆ ಹೋಗುತ್ತೇವೆ",
    "ko": "오늘은 날씨가 아주 좋아서 친구들과 함께 공원에 갑니다",
    "mr": "आज हवामान खूप छान आहे आणि आम्ही आमच्या मित्रांसोबत बागेत जात आहोत",
    "ne": "आज मौसम धेरै राम्रो छ र हामी साथीहरूसँग बगैंचामा जाँदैछौं",
    "pa": "ਅੱਜ ਮੌਸਮ ਬਹੁਤ ਚੰਗਾ ਹੈ ਅਤੇ ਅਸੀਂ ਦੋਸਤਾਂ ਨਾਲ ਬਾਗ ਵਿੱਚ ਜਾ ਰਹੇ ਹਾਂ",
    "pl": "Dzisiaj jest bardzo ładna pogoda i idziemy z przyjaciółmi do parku",
    "pt": "Hoje o tempo está muito bom e nós vamos ao parque com os nossos amigos",
    "ru": "Сегодня очень хорошая погода и мы идём в парк с нашими друзьями",
    "sv": "Idag är vädret mycket fint och vi går till parken med våra vänner",
    "sw": "Leo hali ya hewa ni nzuri sana na tunakwenda bustanini pamoja na marafiki zetu",
    "ta": "இன்று வானிலை மிகவும் நன்றாக உள்ளது நாங்கள் நண்பர்களுடன் பூங்காவிற்கு செல்கிறோம்",
    "te": "ఈ రోజు వాతావరణం చాలా బాగుంది మరియు మేము స్నేహితులతో పార్కుకు వెళ్తున్నాము",
    "th": "วันนี้อากาศดีมากและเราจะไปสวนสาธารณะกับเพื่อนของเรา",
    "tr": "Bugün hava çok güzel ve arkadaşlarımızla birlikte parka gidiyoruz",
    "uk": "Сьогодні дуже гарна погода і ми йдемо до парку з нашими друзями",
    "ur": "آج موسم بہت اچھا ہے اور ہم اپنے دوستوں کے ساتھ باغ میں جا رہے ہیں",
    "vi": "Hôm nay thời tiết rất đẹp và chúng tôi đi công viên với bạn bè",
}


@pytest.fixture(scope="module")
def composed() -> list[Composed]:
    return compose(1500, seed=3)


def _at_least(kwargs: dict[str, Any] | None, relation: str, count: str) -> int:
    return kwargs[count] if kwargs is not None and kwargs[relation] == "at least" else 0


def witness(truth: dict[str, Any]) -> str:
    """A response that follows every instruction, built without looking at the checks."""
    instructions = dict(zip(truth["instruction_id_list"], truth["kwargs"], strict=True))
    language = instructions[c.LANGUAGE]["language"] if c.LANGUAGE in instructions else None
    filler = SAMPLES[language] if language else FILLER
    if c.CAPITAL in instructions:  # langdetect knows English capitals only where there are enough of them
        filler += " and then the other people go out to see more of the land and the sea"
    short = SAMPLES[language] if language else SHORT

    words = filler.split()
    for i in range(instructions.get(c.PLACEHOLDERS, {}).get("num_placeholders", 0)):
        words[i] = f"[{words[i]}]"
    words += instructions.get(c.EXISTENCE, {}).get("keywords", [])
    keyword = instructions.get(c.FREQUENCY)
    if keyword is not None:
        words += [keyword["keyword"]] * _at_least(keyword, "relation", "frequency")
    letter = instructions.get(c.LETTER)
    if letter is not None:
        words.append(letter["letter"] * _at_least(letter, "let_relation", "let_frequency"))
    words += ["OUR"] * _at_least(instructions.get(c.CAPITAL_WORDS), "capital_relation", "capital_frequency")
    words += [f"*{short}*"] * instructions.get(c.HIGHLIGHTS, {}).get("num_highlights", 0)
    words += ["and then the story goes on."] * _at_least(
        instructions.get(c.SENTENCES), "relation", "num_sentences"
    )
    words += islice(cycle(FILLER.split()), _at_least(instructions.get(c.NUM_WORDS), "relation", "num_words"))
    words += ["My answer is yes."] * (c.CONSTRAINED in instructions)
    main = " ".join(words)

    text = json.dumps({"text": main}) if c.JSON in instructions else _structured(main, short, instructions)
    if c.CAPITAL in instructions:
        text = text.upper()
    if c.LOWERCASE in instructions:
        text = text.lower()
    return f'"{text}"' if c.QUOTATION in instructions else text


def _structured(main: str, short: str, instructions: dict[str, dict[str, Any]]) -> str:
    parts = [main]
    if c.BULLETS in instructions:
        parts[0] += f"\n* {short}" * instructions[c.BULLETS]["num_bullets"] + "\n"
    if c.SECTIONS in instructions:
        heading = instructions[c.SECTIONS]["section_spliter"]
        parts[0] += "".join(
            f"\n{heading} {i + 1}\n{short}" for i in range(instructions[c.SECTIONS]["num_sections"])
        )
    divider = ""
    if c.PARAGRAPHS in instructions:
        divider = "\n***\n"
        parts += [short] * (instructions[c.PARAGRAPHS]["num_paragraphs"] - 1)
    if c.NTH_PARAGRAPH in instructions:
        divider = "\n\n"
        parts += [short] * (instructions[c.NTH_PARAGRAPH]["num_paragraphs"] - 1)
        nth = instructions[c.NTH_PARAGRAPH]["nth_paragraph"] - 1
        parts[nth] = f"{instructions[c.NTH_PARAGRAPH]['first_word']} {parts[nth]}"
    if c.TWO in instructions:
        divider = "\n******\n"
        parts.append(f"{short} {short}")
    text = divider.join(parts)
    if c.TITLE in instructions:
        text = f"<<{short}>>\n{text}"
    if c.REPEAT in instructions:
        text = f"{instructions[c.REPEAT]['prompt_to_repeat']}\n\n{text}"
    if c.POSTSCRIPT in instructions:
        text += f"\n\n{instructions[c.POSTSCRIPT]['postscript_marker']} {short}"
    if c.ENDING in instructions:
        text += f" {instructions[c.ENDING]['end_phrase']}"
    return text


@pytest.mark.slow
def test_every_composed_prompt_can_be_satisfied(composed: list[Composed]) -> None:
    failed = [
        (entry.prompt, response, strict)
        for entry in composed
        for response in [witness(entry.truth)]
        for strict, _ in [follow_list(response, entry.truth)]
        if not all(strict)
    ]
    assert failed == []


def test_truths_are_complete_and_clean(composed: list[Composed]) -> None:
    for entry in composed:
        truth = entry.truth
        assert clean_truth(truth["instruction_id_list"], truth["kwargs"], entry.prompt) == truth
        assert 1 <= len(set(truth["instruction_id_list"])) == len(truth["instruction_id_list"]) <= 3
        assert json.loads(json.dumps(truth)) == truth


def test_every_type_comes_up_often_and_prompts_have_one_two_or_three(composed: list[Composed]) -> None:
    counts = {name: 0 for name in CHECKS}
    sizes = {1: 0, 2: 0, 3: 0}
    for entry in composed:
        sizes[len(entry.truth["kwargs"])] += 1
        for name in entry.truth["instruction_id_list"]:
            counts[name] += 1
    assert min(counts.values()) >= 40, counts
    assert min(sizes.values()) >= 200, sizes


def test_no_prompt_holds_a_conflicting_pair(composed: list[Composed]) -> None:
    assert {c.TWO, c.QUOTATION} in c.CONFLICTS
    assert {c.CAPITAL, c.LOWERCASE} in c.CONFLICTS
    for entry in composed:
        ids = set(entry.truth["instruction_id_list"])
        assert not any(pair <= ids for pair in c.CONFLICTS), entry


def test_the_prompt_states_every_argument(composed: list[Composed]) -> None:
    for entry in composed:
        for name, kwargs in zip(entry.truth["instruction_id_list"], entry.truth["kwargs"], strict=True):
            for argument, value in kwargs.items():
                if argument in ("relation", "let_relation", "capital_relation"):
                    continue  # said in many ways; the next test reads the wordings apart
                values = value if isinstance(value, list) else [value]
                shown = [topics.LANGUAGES[value]] if argument == "language" else [str(v) for v in values]
                assert all(text in entry.prompt for text in shown), (name, argument, entry.prompt)
        assert "{" not in entry.prompt and "}" not in entry.prompt


def test_wordings_come_in_several_and_relations_have_their_own() -> None:
    fewer_words = ("less", "fewer", "below", "under")
    for name, wording in WORDINGS.items():
        assert len(set(wording.phrases)) >= 3, name
        if wording.relation is not None:
            assert len(set(wording.less_phrases)) >= 3, name
            assert all(any(word in phrase for word in fewer_words) for phrase in wording.less_phrases), name
            for phrase in wording.phrases:
                assert not any(word in phrase.replace("no fewer", "") for word in fewer_words), phrase


def test_prompts_are_distinct_and_a_longer_list_starts_with_the_shorter(composed: list[Composed]) -> None:
    assert len({entry.prompt for entry in composed}) == len(composed)
    assert compose(20, seed=3) == composed[:20]
    assert compose(20, seed=4) != composed[:20]


def test_prompts_to_avoid_do_not_come_up(composed: list[Composed]) -> None:
    unwanted = [composed[0].prompt, "  " + composed[2].prompt.replace(" ", "  ")]
    assert compose(3, seed=3, avoid=unwanted) == [composed[1], composed[3], composed[4]]


def test_vocabulary_keeps_its_promises() -> None:
    assert not any(word != other and word in other for word in topics.WORDS for other in topics.WORDS)
    requests = [*topics.REQUESTS, *topics.TOPICS, *topics.QUESTIONS, *topics.END_PHRASES]
    assert not any(mark in text for text in requests for mark in ',[]*<>"')
    for names in (topics.WORDS, topics.TOPICS, topics.REQUESTS, topics.QUESTIONS, topics.OPENERS):
        assert len(set(names)) == len(names)
    assert set(SAMPLES) == set(topics.LANGUAGES)


def test_each_sample_is_told_to_be_in_its_language() -> None:
    wrong = [code for code, sample in SAMPLES.items() if not CHECKS[c.LANGUAGE](sample, {"language": code})]
    assert wrong == []


@pytest.mark.parametrize(
    "instructions",
    [
        [(c.EXISTENCE, {"keywords": ["valley"]}), (c.FORBIDDEN, {"forbidden_words": ["valley"]})],
        [
            (c.EXISTENCE, {"keywords": ["zebra"]}),
            (c.LETTER, {"letter": "z", "let_relation": "less than", "let_frequency": 1}),
        ],
        [(c.FORBIDDEN, {"forbidden_words": ["night"]})],  # stands in the request
        [
            (c.PARAGRAPHS, {"num_paragraphs": 5}),
            (c.SENTENCES, {"num_sentences": 3, "relation": "less than"}),
        ],
        [
            (c.SECTIONS, {"section_spliter": "SECTION", "num_sections": 4}),
            (c.CAPITAL_WORDS, {"capital_frequency": 3, "capital_relation": "less than"}),
        ],
    ],
)
def test_arguments_that_contradict_each_other_clash(instructions: list[tuple[str, dict[str, Any]]]) -> None:
    assert c.clash("Write a poem about the night train.", instructions)
    assert not c.clash("Write a poem about soup.", instructions[:1])
