"""Wordings of places and of nature."""

from __future__ import annotations

from trace_gym.envs.search.tasks.wording import Wording

KNOWN = (
    "{name:cap} is known for {about}.",
    "Visitors and readers connect {name} with {about}.",
    "The name {name} calls up {about}.",
    "What people tell of {name}: {about}.",
)
ABOUT = ("{about:cap}.",)
WHERE = "One finds it in {where}."
MATE = "The same year also saw {mate}."

PLACES: dict[str, Wording] = {
    "country": Wording(
        (
            (
                "{name:The} is a country in {region} whose capital is {capital}.",
                "{name:The} is a state in {region}; it is governed from {capital}.",
                "{capital} is the capital of {name:the}, a country in {region}.",
                "{name:The} is a country in {region}.",
            ),
            (
                "People there pay with the {currency}.",
                "Its currency is the {currency}.",
                "Prices are given in the {currency}.",
            ),
            (
                "Its official language{languages:s} {languages:is} {languages}.",
                "By law {languages} {languages:is} used in public offices.",
            ),
            ("It shares land borders with {neighbours:the}.", "Its neighbours on land are {neighbours:the}."),
            (
                "The adjective for things that come from {name:the} is {adjective}.",
                "What comes from {name:the} is called {adjective}.",
            ),
        ),
        ("region",),
        ("Other states of that region include {peers:the}.", "It lies in the same part of the world as {peers:the}."),
        ("It has a flag and an anthem of its own.",),
    ),
    "state": Wording(
        (
            (
                "{name:cap} is a {type} of {country:the}; its capital is {capital}.",
                "{capital} is the capital of {name}, a {type} of {country:the}.",
            ),
            ("It has been part of the union since {since}.", "It joined in {since}."),
            KNOWN,
        ),
        ("country",),
        ("Other parts of that country are {peers}.", "{peers:cap} belong{peers:v} to the same country."),
        ("Like every {type} of the country it has a parliament of its own.",),
    ),
    "city": Wording(
        (
            (
                "{name:cap} is a city in {place:the}.",
                "{name:cap} lies in {place:the}.",
                "{name:cap} is a town of {place:the}.",
            ),
            ("It stands on the {river}.", "The {river} flows through it."),
            ("It lies on the shore of {coast:water}.", "It is a port on {coast:water}."),
            KNOWN,
        ),
        ("place",),
        ("Other cities of that land include {peers}.", "In the same land lie{peers:v} {peers}."),
        (
            WHERE,
            "Maps show it as one of the better-known towns of the area.",
        ),
    ),
    "river": Wording(
        (
            (
                "The {name} rises in {source} and flows into {mouth:water}.",
                "From its source in {source} the {name} runs to {mouth:water}.",
            ),
            ("It touches {countries:the}.", "On its way it passes {countries:the}."),
            ABOUT,
        ),
        ("mouth",),
        ("Its water ends up in the same place as that of the {peers}.", "The {peers} end{peers:v} in the same water."),
        ("Boats, bridges and fish belong to its everyday life, as with other large rivers.",),
    ),
    "mountain": Wording(
        (
            ("{name:cap} is a mountain in {country:the}.", "In {country:the} rises {name}."),
            ("It is {metres} metres high.", "Its height is given as {metres} metres."),
            ("It belongs to the {range}.", "It is part of the {range}."),
            ("It was first climbed in {ascent}.", "The first ascent was made in {ascent}."),
            ABOUT,
        ),
        ("country",),
        ("In the same country rise{peers:v} {peers}.", "Climbers there also know {peers}."),
        (
            WHERE,
            "Walkers and climbers come when the weather is good.",
        ),
    ),
    "lake": Wording(
        (
            (
                "{name:cap} is a body of water in {countries:the}.",
                "{name:cap} lies in {countries:the}.",
            ),
            ("It is up to {metres} metres deep.", "Its greatest depth is {metres} metres."),
            ABOUT,
        ),
        (),
        ("Other lakes one may read about are {peers}.", "{peers:cap} {peers:is} often named beside it."),
        ("Anglers and sailors know it well.",),
    ),
    "island": Wording(
        (
            (
                "{name:cap} belongs to {place:the} and lies in {sea:water}.",
                "In {sea:water} lies {name}, part of {place:the}.",
            ),
            ("Its main town is {town}.", "Most of its offices are in {town}."),
            ABOUT,
        ),
        ("place",),
        ("The same flag flies on {peers}.", "To the same country belong{peers:v} {peers} as well."),
        (
            WHERE,
            "One reaches it by ship or by air.",
        ),
    ),
    "feature": Wording(
        (
            (
                "{name:cap} is a {kind}; its place on the map: {place:the}.",
                "{name:cap}, a {kind}, belongs to the landscape of {place:the}.",
            ),
            ABOUT,
        ),
        ("kind",),
        ("{peers:cap} {peers:is} of the same kind.", "Things of the same kind include {peers}."),
        ("Travellers, painters and geographers have often written of it or shown it.",),
    ),
    "park": Wording(
        (
            ("{name:cap} is a national park in {place:the}.", "In {place:the} lies the national park {name}."),
            ("It was founded in {founded}.", "It has been protected since {founded}."),
            ABOUT,
        ),
        (),
        ("People also travel to the parks {peers}.", "{peers:cap} {peers:is} protected in the same manner."),
        (
            WHERE,
            "Rangers look after it, and visitors have to keep to its rules.",
        ),
    ),
    "element": Wording(
        (
            (
                "{name:cap} is a chemical element with the symbol {symbol} and the atomic number {number}.",
                "The chemical element {name} has the symbol {symbol} and the atomic number {number}.",
            ),
            ("It is {class:a}.", "Chemists count it as {class:a}."),
            (
                "It was discovered by {discoverer} in {year}.",
                "{discoverer} discovered it in {year}.",
                "It has been known since {year}.",
            ),
            ABOUT,
        ),
        ("class",),
        ("To the same group belong{peers:v} {peers}.", "Of the same class {peers:is} {peers}."),
        ("It has a box of its own in the periodic table.",),
    ),
    "planet": Wording(
        (
            ("{name:cap} is a {kind} of the solar system, {diameter} kilometres across.",),
            ("The number of its known moons is {moons}.",),
            ABOUT,
        ),
        (),
        ("It circles the same star as {peers}.", "{peers:cap} circle{peers:v} the same star."),
        ("Telescopes and spacecraft have studied it.",),
    ),
    "moon": Wording(
        (
            ("{name:cap} is a moon of {planet}.", "Around {planet} moves the moon {name}."),
            (
                "It was discovered by {discoverer} in {year}.",
                "{discoverer} discovered it in {year}.",
                "It was first seen in {year}.",
            ),
            ABOUT,
        ),
        ("planet",),
        ("{peers:cap} move{peers:v} around the same planet.", "The same planet also has {peers}."),
        (
            "Spacecraft have sent pictures of it.",
            "Its phases have shaped calendars, songs and stories of all peoples.",
        ),
    ),
    "mission": Wording(
        (
            (
                "{name:cap} was launched in {year} by {launcher}; its target was {target}.",
                "In {year} {name} was sent into space by {launcher}, bound for {target}.",
            ),
            ABOUT,
        ),
        ("launcher",),
        ("From the same side came {peers}.", "{launcher:cap} also sent out {peers}."),
        (
            MATE,
            "Engineers and scientists had worked on it for years.",
        ),
    ),
    "constellation": Wording(
        (
            (
                "{name:cap} is a constellation; its name means {meaning}.",
                "The constellation {name} stands for {meaning}.",
            ),
            ("Its brightest star is {star}.", "{star} shines brightest in it."),
            ABOUT,
        ),
        (),
        ("Sky maps also show {peers}.", "Stargazers also look for {peers}."),
        ("On a clear night one can find it with a map of the sky.",),
    ),
    "unit": Wording(
        (
            (
                "The {name} is a unit of {quantity}; its symbol is {symbol}.",
                "In physics {quantity} is measured in the {name}, symbol {symbol}.",
            ),
            ("It is named after {person}.", "It honours {person}."),
            ABOUT,
        ),
        (),
        ("People are also honoured by the {peer} and other units.",),
        ("It belongs to an international system of measures.",),
    ),
    "mineral": Wording(
        (
            ("{name:cap} consists of {formula}.", "{name:cap} is a natural substance, namely {formula}."),
            (
                "Its hardness on the scale of Mohs is {hardness}.",
                "On the scale of Mohs it has a hardness of {hardness}.",
            ),
            ABOUT,
        ),
        (),
        ("Collectors also look for {peers}.", "Museums show it beside {peers}."),
        (
            "Pieces of it lie in many collections.",
            "Geologists know it well and can tell it by simple tests.",
        ),
    ),
    "animal": Wording(
        (
            (
                "The {name:low} is {class:a} of {country:the} that lives in {home}.",
                "In {country:the} lives the {name:low}, {class:a} of {home}.",
                "The {name:low} is {class:a}; its home: {home}.",
            ),
            ABOUT,
        ),
        ("class",),
        ("Books on animals also describe the {peer:low}.", "Another {class} is the {peer:low}."),
        (
            WHERE,
            "Zoologists and people who love nature look for it there.",
            "Films and books show how it lives.",
        ),
    ),
    "plant": Wording(
        (
            (
                "{name:cap} is {kind:a} of {country:the}; its home: {home}.",
                "In {country:the} grows {name}, {kind:a} of {home}.",
                "{name:cap} is {kind:a}; its home: {home}.",
            ),
            ABOUT,
        ),
        ("kind",),
        ("Gardeners also know {peers}.", "Of the same kind {peers:is} {peers}."),
        (
            WHERE,
            "Botanists have described it, and gardeners know it too.",
            "Its picture is in many books on plants.",
        ),
    ),
    "food": Wording(
        (
            (
                "{name:cap} is {kind:a} from {country:the}.",
                "From {country:the} comes {name}, {kind:a}.",
                "{name:cap} is {kind:a}.",
            ),
            ("What belongs to it: {about}.", "One may think of it as {about}."),
        ),
        ("kind",),
        ("Travellers may also taste {peers}.", "Those who like it may also try {peers}."),
        (
            WHERE,
            "Cooks have their own recipes for it.",
            "It is eaten at home as well as in restaurants.",
        ),
    ),
    "language": Wording(
        (
            (
                "{name:cap} is the language of {country:the}; it belongs to this family: {family}.",
                "In {country:the} people speak {name}, a language of this family: {family}.",
                "{name:cap} is a language; its family: {family}.",
            ),
            ("It is written in {script} letters.", "Its script is {script}."),
            ABOUT,
        ),
        ("family",),
        ("Linguists also study {peers}.", "To the same family belong{peers:v} {peers}."),
        (
            WHERE,
            "There are courses, grammars and dictionaries for those who want to learn it.",
        ),
    ),
}
