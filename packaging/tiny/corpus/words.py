"""Plain English word lists that several skills draw from. Data only."""

from __future__ import annotations


def listed(words: str) -> tuple[str, ...]:
    """The words of a text, in their order."""
    return tuple(words.split())


ANIMALS = listed(
    """fox cat dog rabbit bear wolf mouse owl hedgehog squirrel deer horse cow pig sheep goat duck goose hen frog toad
    turtle snail bee ant spider butterfly beetle lion tiger elephant giraffe zebra monkey panda koala kangaroo penguin
    seal whale dolphin shark crab octopus otter beaver badger mole bat crow raven eagle sparrow robin swan parrot
    pigeon camel donkey llama lizard snake crocodile hamster raccoon moose lynx stork heron peacock turkey salmon
    lobster jellyfish worm cricket dragonfly kitten puppy lamb pony chicken fish bird"""
)

CREATURES = listed("dragon unicorn robot ghost giant fairy dwarf wizard knight princess pirate mermaid troll")

COLOURS = listed(
    """red blue green yellow orange purple pink brown black white grey silver gold turquoise violet crimson teal
    indigo beige scarlet lilac maroon navy olive coral mint amber ivory"""
)

FOODS = listed(
    """pizza pasta soup bread cheese rice noodles salad pancakes apples bananas cherries strawberries chocolate honey
    sushi tacos curry potatoes tomatoes mushrooms carrots cake cookies waffles porridge yoghurt nuts grapes pears
    peaches plums lemons dumplings lentils beans corn spinach pumpkin popcorn"""
)

HOBBIES = listed(
    """reading swimming running painting drawing dancing singing cooking baking hiking cycling fishing gardening
    knitting chess football tennis photography climbing sailing skating skiing writing programming juggling yoga
    camping sewing pottery astronomy"""
)

JOBS = listed(
    """teacher doctor nurse baker farmer pilot painter writer singer lawyer cook driver engineer builder carpenter
    gardener plumber librarian scientist photographer musician dentist tailor designer fisherman programmer postman
    student"""
)

CITIES = listed(
    """London Paris Berlin Rome Madrid Vienna Oslo Prague Lisbon Dublin Athens Warsaw Helsinki Tokyo Cairo Nairobi
    Sydney Toronto Boston Chicago Lima Bogota Mumbai Delhi Seoul Hanoi Kyoto Geneva Zurich Hamburg Lyon Porto Bergen
    Krakow Ghent Bristol Leeds Glasgow Denver Austin Montreal Auckland Marseille"""
)

PETS = listed("dog cat rabbit hamster parrot turtle horse goldfish mouse snake lizard pony bird")

PLACES = listed(
    """forest garden valley village meadow desert island mountain city river lake cave castle farm beach swamp jungle
    field harbour barn library kitchen park tower market orchard cellar attic bridge mill"""
)

ADJECTIVES = listed(
    """little big small old young brave shy clever lazy happy sad hungry tired curious kind gentle quiet noisy proud
    lonely friendly funny strong tiny huge wise silly busy careful cheerful sleepy nervous polite stubborn bold calm
    warm cold soft hard bright dark sweet bitter fast slow heavy light clean dirty dry wet rich poor sharp smooth
    rough deep round flat"""
)

THINGS = listed(
    """apple ball basket bell blanket boat book bottle box bread broom brush bucket button cake candle card carpet
    chair clock cloud coat coin cup desk door drum feather fence flower fork glass glove hammer hat house jacket jar
    key kite knife ladder lamp leaf letter map mirror moon nail needle nest paper pen pencil piano picture pillow
    plate pocket pot rain ring road rock roof rope sand shell ship shirt shoe shovel snow soap sock spoon star stick
    stone street string sun table tent thread ticket toy train tree truck umbrella violin wall water wheel whistle
    wind window wool yarn banana bicycle computer keyboard lantern mountain notebook orange pepper planet puzzle
    rocket sandwich scissors suitcase teapot telephone tomato trumpet tunnel wagon engine magnet marble
    helicopter microscope parachute skeleton thermometer wheelbarrow"""
)

VERBS = listed(
    """run walk jump sing dance eat drink sleep read write play swim climb fly fall laugh cry shout whisper look
    listen watch open close build break carry throw catch push pull cut draw paint cook bake wash clean find lose
    give take buy sell bring send help hide seek win learn teach think dream wait stop start turn move stay leave
    come go grow shine burn freeze melt follow lead visit remember forget"""
)

SMALL_WORDS = listed(
    """the a and of to in is on that it for was with as at be this from or by not but are we you they he she my your
    his her our their one two three four five six seven eight nine ten all some no very well here there now then
    never always today tomorrow yesterday again soon up down over under near far before after"""
)

ANY_WORDS = tuple(
    dict.fromkeys(
        ANIMALS
        + CREATURES
        + COLOURS
        + FOODS
        + HOBBIES
        + JOBS
        + tuple(city.lower() for city in CITIES)
        + PLACES
        + ADJECTIVES
        + THINGS
        + VERBS
        + SMALL_WORDS
    )
)


def with_article(noun: str) -> str:
    """`fox` -> `a fox`, `otter` -> `an otter`."""
    return f"an {noun}" if noun[0].lower() in "aeiou" else f"a {noun}"
