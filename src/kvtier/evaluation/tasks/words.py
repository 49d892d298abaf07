"""Plain words that prompts are made of."""

from __future__ import annotations

import random
import string
import uuid
from typing import Final

_ADJECTIVES: Final = """
amber ancient bitter brave bright broad broken calm careful clever cold common copper crimson curious damp dark
distant double dry eager early eastern empty faint famous fast fierce flat formal fresh friendly gentle glad golden
grand gray great green grim happy heavy hidden hollow honest humble hungry icy idle jolly keen kind large late lazy
light little lonely loud lucky mellow merry mild misty modest narrow neat noble northern odd pale patient plain
polite proud quick quiet rapid rare rough round rusty sad salty shallow sharp shy silent silver simple sleepy slow
small smooth soft solid southern steady steep stern stray sturdy sudden sunny sweet swift tall tame tender thick
thin tidy tiny tired upper vague vast warm weary western wide wild wise young
"""
_NOUNS: Final = """
acorn anchor apple arrow badge banner barley barn basin basket beacon bell bench berry blanket boat bottle branch
bread brick bridge brook broom brush bucket button cabin candle canyon carpet castle cedar cellar chair chalk cherry
chest clay cliff clock cloak cloud clover coast coin comet copper corner cotton crane creek crown curtain daisy desk
door drum eagle ember engine fabric falcon farm feather fence fern field flag flame flint flute forest fountain fox
garden gate glass glove grain grape gravel hammer harbor harvest hatch hawk hazel hedge helmet heron hill hinge
honey horn island ivy jacket jar kettle key kite ladder lake lamp lantern lark leaf lemon letter lily lock loom
maple marble market marsh meadow mill mirror moon moss mountain needle nest oak oar olive orchard otter owl paddle
palace paper path peach pear pearl pebble pencil pepper piano pillow pine pipe plank plate plum pocket pond poppy
porch quill rabbit raft rail rain raven reed ribbon ridge ring river road robin rock roof rope rose saddle sail
salmon sand shell shield ship shore shovel silk sky slate sleeve snow spade sparrow spoon spring square stable star
steam stone storm straw stream summit swan table tailor temple thorn thread thunder tide tiger timber torch tower
trail train tree trumpet tulip tunnel valley velvet village vine violin wagon walnut water wheat wheel whistle
willow window winter wolf wood wool yard
"""
ADJECTIVES: Final = tuple(_ADJECTIVES.split())
NOUNS: Final = tuple(_NOUNS.split())


def distinct_keys(rng: random.Random, n: int) -> list[str]:
    """`n` different names such as "quiet-lantern"; from 20,000 on with a third word."""
    n_pairs = len(ADJECTIVES) * len(NOUNS)

    def name(i: int) -> str:
        rest, pair = divmod(i, n_pairs)
        adjective, noun = ADJECTIVES[pair // len(NOUNS)], NOUNS[pair % len(NOUNS)]
        return f"{adjective}-{noun}" if rest == 0 else f"{adjective}-{noun}-{NOUNS[rest - 1]}"

    room = n_pairs if n <= 20_000 else n_pairs * (len(NOUNS) + 1)
    return [name(i) for i in rng.sample(range(room), n)]


def compounds(rng: random.Random, n: int) -> list[str]:
    """`n` different words such as "stonebridge": two nouns in one."""
    room = len(NOUNS) ** 2
    return [NOUNS[i // len(NOUNS)] + NOUNS[i % len(NOUNS)] for i in rng.sample(range(room), n)]


def number(rng: random.Random, n_digits: int) -> str:
    """A number of exactly `n_digits` digits."""
    return str(rng.randrange(10 ** (n_digits - 1), 10**n_digits))


def identifier(rng: random.Random) -> str:
    """A random UUID."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def letters(rng: random.Random, n: int, alphabet: str = string.ascii_lowercase) -> str:
    return "".join(rng.choices(alphabet, k=n))
