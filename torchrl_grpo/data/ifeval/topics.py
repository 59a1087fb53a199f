"""Requests, topics and yes-or-no questions of the composed prompts.

Requests contain no comma, bracket or asterisk, so that repeating a request never breaks a format rule.
"""

from __future__ import annotations

REQUESTS = (
    "Write a short article about {topic}.",
    "Write a friendly letter to a neighbour about {topic}.",
    "Write an email to a colleague about {topic}.",
    "Write a blog post about {topic}.",
    "Write a short poem about {topic}.",
    "Write a song about {topic}.",
    "Write a product description inspired by {topic}.",
    "Write a speech for a school assembly about {topic}.",
    "Write a diary entry by somebody who cares a lot about {topic}.",
    "Write a short story in which {topic} matters.",
    "Write a conversation between two friends about {topic}.",
    "Write a newsletter item about {topic}.",
    "Write a beginner's guide to {topic}.",
    "Write an announcement about {topic} for a town website.",
    "Write a review for a magazine about {topic}.",
    "Write a job advertisement for somebody who works with {topic}.",
    "Explain {topic} to a ten-year-old.",
    "Explain to a busy adult why {topic} is worth an hour of their time.",
    "Describe {topic} to somebody who has never heard of it.",
    "Give practical advice about {topic}.",
    "Give your opinion on {topic} and defend it.",
    "Give a summary of what most people know about {topic}.",
    "Compare what is good and what is bad about {topic}.",
    "Suggest a weekend project around {topic}.",
    "Plan a one-day workshop about {topic}.",
    "Propose a small business built on {topic}.",
    "Invent a legend that explains the origin of {topic}.",
    "Draft a proposal asking a library to host an evening about {topic}.",
    "Draft an invitation to a club meeting about {topic}.",
    "Draft questions and answers for a leaflet about {topic}.",
    "What should a newcomer know about {topic}?",
    "What are common mistakes people make with {topic}?",
    "How has {topic} changed over the last hundred years?",
    "How would you teach {topic} to a class of adults?",
)

_TOPICS = """
    growing tomatoes; keeping bees; baking sourdough bread; learning to swim; the night train; public
    libraries; city cycling; mountain weather; old maps; the history of paper; repairing clocks;
    volcanoes; coral reefs; train stations; street markets; wooden boats; bird watching; chess openings;
    learning the violin; jazz; knitting scarves; making cheese; wild mushrooms; school gardens; solar
    panels; wind turbines; recycling glass; the water cycle; tides; comets; the moon landing; black
    holes; telescopes; microscopes; vaccines; healthy sleep; stretching exercises; marathon training;
    table tennis; ice skating; mountain rescue; lighthouses; bridges; tunnels; elevators; the printing
    press; typewriters; early computers; computer passwords; video games; board games; card tricks;
    puppet theatre; silent films; photography; oil painting; pottery; stained glass; calligraphy;
    crossword puzzles; learning a language; sign language; travel journals; camping in autumn; desert
    plants; rain forests; wolves; octopuses; hedgehogs; sled dogs; guide dogs; house cats; goldfish;
    honey; chocolate; coffee roasting; green tea; soup recipes; pickled vegetables; street food; picnic
    lunches; family dinners; birthday parties; moving house; small apartments; tidy desks; saving money;
    paying bills; first jobs; job interviews; remote work; team meetings; difficult phone calls; good
    manners; apologising well; making friends; grandparents; younger siblings; homework; exam nerves;
    school uniforms; summer holidays; snow days; thunderstorms; heat waves; river floods; earthquakes;
    fire drills; first aid; blood donation; volunteering; elections; local newspapers; museums; castles;
    roman roads; vikings; pirates; sailing knots; paper planes; hot air balloons; helicopters; electric
    cars; buses at night; airport queues; lost luggage
"""
TOPICS = tuple(" ".join(topic.split()) for topic in _TOPICS.split(";"))

QUESTIONS = (
    "Is it better to walk to work than to drive?",
    "Can a cat and a dog become friends?",
    "Is a tomato a fruit?",
    "Should homework be given to young children?",
    "Does coffee taste better in the morning?",
    "Is winter a good season for camping?",
    "Can plants grow without soil?",
    "Should every town have a public library?",
    "Is chess harder to learn than table tennis?",
    "Do people sleep better in a cold room?",
    "Is it polite to eat soup with a fork?",
    "Can an adult learn to play the violin?",
    "Is the moon larger than the earth?",
    "Should shops be closed one day a week?",
    "Is a long train journey more pleasant than a short flight?",
    "Can a whale live in a lake?",
    "Is honey sweeter than lemon juice?",
    "Are board games more fun than video games?",
    "Is it wise to lend money to a friend?",
    "Does practice make everybody better at drawing?",
    "Is paper made from wood?",
    "Can you see stars in the daytime?",
    "Is glass easier to recycle than plastic?",
    "Should a small flat have a large table?",
)

# Words that an instruction asks to use or to avoid. None is a substring of another, so that using one never
# counts as using another.
_WORDS = """
    bright careful curious promise journey harvest lantern marble thunder velvet whisper balance breeze
    candle courage distant effort favourite gentle honest island jacket kitchen ladder meadow needle
    orange patient quiet ribbon silver travel useful valley window yellow anchor basket copper dinosaur
    engine feather gravity hammer insect jungle kingdom lemonade mirror noise opinion pocket quarter
    rhythm simple temple umbrella victory wisdom zebra bucket cabin dolphin emerald fountain garlic
    horizon ivory jewel kettle logic magnet
"""
WORDS = tuple(_WORDS.split())

# First words for a paragraph; each can open an English sentence.
OPENERS = (
    "today",
    "suddenly",
    "sometimes",
    "perhaps",
    "meanwhile",
    "imagine",
    "remember",
    "honestly",
    "usually",
    "everyone",
    "nobody",
    "tomorrow",
)

# These contain no comma and no asterisk either.
END_PHRASES = (
    "That is all for today.",
    "And that is the whole story.",
    "Now it is your turn.",
    "Tell me what you would change.",
    "Does that answer your question?",
    "Thank you for reading this far.",
    "The rest is up to you.",
    "Let us talk again soon!",
)

# langdetect's code -> the language's English name.
LANGUAGES = {
    "ar": "Arabic",
    "bg": "Bulgarian",
    "bn": "Bengali",
    "cs": "Czech",
    "de": "German",
    "el": "Greek",
    "es": "Spanish",
    "fa": "Persian",
    "fi": "Finnish",
    "fr": "French",
    "gu": "Gujarati",
    "he": "Hebrew",
    "hi": "Hindi",
    "hu": "Hungarian",
    "it": "Italian",
    "ja": "Japanese",
    "kn": "Kannada",
    "ko": "Korean",
    "mr": "Marathi",
    "ne": "Nepali",
    "pa": "Punjabi",
    "pl": "Polish",
    "pt": "Portuguese",
    "ru": "Russian",
    "sv": "Swedish",
    "sw": "Swahili",
    "ta": "Tamil",
    "te": "Telugu",
    "th": "Thai",
    "tr": "Turkish",
    "uk": "Ukrainian",
    "ur": "Urdu",
    "vi": "Vietnamese",
}
