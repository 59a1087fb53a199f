"""An echo with a twist: the model has to find a word and write nothing else."""

import random
import sys

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    message: str


class Heard(Observation):
    text: str


class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=None, **parameters):
        draw = random.Random(seed)
        self.word = "".join(draw.choice("bdfklmnprst") + draw.choice("aeiou") for _ in range(3))
        return Heard(text=f"The word is {self.word}. Write the word alone.")

    def step(self, action, **parameters):
        if action.message.strip(" .").lower() == self.word:
            return Heard(text="Right.", reward=1.0, done=True)
        reward = 0.2 if self.word in action.message.lower() else 0.0
        return Heard(text=f"No. Write only {self.word}.", reward=reward)


app = create_app(Echo, Say, Heard, max_concurrent_envs=256)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
