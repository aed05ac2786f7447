"""Wordings of people, their works and their history."""

from __future__ import annotations

from trace_gym.envs.search.tasks.wording import Wording

ABOUT = ("{about:cap}.",)
MATE = "The same year also saw {mate}."

PEOPLE: dict[str, Wording] = {
    "invention": Wording(
        (
            (
                "{name:cap} was invented by {inventor} in {year}.",
                "In {year} {inventor} came up with {name}.",
                "{inventor} is credited with {name}, which dates from {year}.",
            ),
            ABOUT,
        ),
        (),
        ("Museums of technology also tell of {peers}.", "Histories of technology name it beside {peers}."),
        (
            MATE,
            "It changed daily life or the work of many people.",
        ),
    ),
    "proglang": Wording(
        (
            (
                "{name:cap} is a computer language designed by {designer} that appeared in {year}.",
                "In {year} appeared {name}, a computer language designed by {designer}.",
                "{name:cap} is a computer language designed by {designer}.",
                "{name:cap} is a computer language of {year}.",
            ),
            ABOUT,
        ),
        (),
        ("Programmers may compare it with {peers}.", "Computers are also told what to do in {peers}."),
        (
            MATE,
            "Manuals and compilers for it can be found on the net.",
        ),
    ),
    "person": Wording(
        (
            (
                "{name:cap} {was} {who:a}, born in {birthplace} in {born}.",
                "Born in {birthplace} in {born}, {name} {was} {who:a}.",
                "{name:cap} {was} {who:a} who was born in {born} in {birthplace}.",
                "{name:cap} {was} {who:a}, born in {born}.",
                "{name:cap} {was} {who:a}, born in {birthplace}.",
                "{name:cap} {was} {who:a}.",
            ),
            (
                "{He} is remembered for {known}.",
                "{He} became known for {known}.",
                "Readers connect the name with {known}.",
                "What made {him} famous: {known}.",
            ),
            ("{He} died in {died}.", "{His} life ended in {died}."),
        ),
        ("trade",),
        ("Another {trade} of that age was {peer}.", "Of about the same age was the {trade} {peer}."),
        (
            "Of the same generation were {coevals}.",
            "Encyclopedias have an article on {him}.",
            "Books and films about {him} have been made since.",
            "Historians and teachers still speak of {him}.",
        ),
    ),
    "book": Wording(
        (
            (
                "{name:cap} is {form:a} by {author} that appeared in {year}.",
                "{author} wrote {name}, {form:a} that came out in {year}.",
                "{name:cap}, {form:a} by {author}, dates from {year}.",
                "{name:cap} is {form:a} by {author}.",
            ),
            ("It tells of {about}.", "At its heart: {about}.", "Its subject: {about}."),
        ),
        ("form",),
        ("Readers of such works also know {peers}.", "Libraries keep it not far from {peers}."),
        (MATE, "It has been translated into many languages.", "Libraries and bookshops have it in several editions."),
    ),
    "music": Wording(
        (
            (
                "{name:cap} is {form:a} by {composer} from {year}.",
                "{composer} wrote {name}, {form:a} that dates from {year}.",
            ),
            ("Listeners connect it with {about}.", "Its theme: {about}.", "What one hears in it or of it: {about}."),
        ),
        (),
        ("Concert goers also know {peers}.", "On other evenings one may hear {peers}."),
        (
            MATE,
            "There are many recordings of it.",
        ),
    ),
    "painting": Wording(
        (
            (
                "{name:cap} was painted by {painter} around {year}.",
                "{painter} painted {name} around {year}.",
                "{name:cap} is the work of {painter}.",
            ),
            ("It shows {about}.", "One sees {about}."),
            ("It hangs in the {museum}.", "It is kept in the {museum}."),
        ),
        ("museum",),
        ("The same collection owns {peers}.", "{peers:cap} can be seen there too."),
        (
            MATE,
            "Copies of it can be seen in books and on postcards.",
        ),
    ),
    "museum": Wording(
        (
            ("{name:cap} is a museum in {city}.", "In {city} stands a museum: {name}."),
            ("It dates from {founded}.", "It goes back to {founded}."),
            ("People visit it for {about}.", "It is known for {about}."),
        ),
        (),
        ("Lovers of museums also travel to {peers}.", "Guidebooks name it together with {peers}."),
        ("Its opening hours and its plans are on its web site.",),
    ),
    "film": Wording(
        (
            (
                "{name:cap} is {form:a} of {year} directed by {director}.",
                "{director} directed {name}, {form:a} of {year}.",
            ),
            ("It stars {stars}.", "Among its actors {stars:is} {stars}."),
            ("It tells of {about}.", "Its story: {about}."),
        ),
        (),
        ("Film lovers also know {peers}.", "Cinemas still show it, as they show {peers}."),
        (
            MATE,
            "It has been shown all over the world.",
        ),
    ),
    "building": Wording(
        (
            (
                "{name:cap} in {city} was designed by {architect} and completed in {year}.",
                "In {city} stands {name}, completed in {year} to a design by {architect}.",
                "{name:cap} stands in {city} and was completed in {year}.",
                "{name:cap} in {city} was designed by {architect}.",
                "{name:cap} stands in {city}.",
            ),
            ABOUT,
        ),
        (),
        ("Architects also study {peers}.", "Students of building compare it with {peers}."),
        (
            MATE,
            "Guides tell its story to visitors every day.",
        ),
    ),
    "bridge": Wording(
        (
            ("{name:cap} crosses {crosses:water} in {city}.", "In {city} {name} leads across {crosses:water}."),
            ("It was opened in {year}.", "It has stood in this form since {year}."),
            ABOUT,
        ),
        (),
        ("Travellers also cross {peers}.", "Engineers also admire {peers}."),
        ("People cross it on foot, and many take a picture.",),
    ),
    "university": Wording(
        (
            (
                "{name:cap} in {city} was founded in {founded}.",
                "In {city} {name} was founded in {founded}.",
                "{name:cap} is a place of learning in {city}.",
            ),
            ABOUT,
        ),
        (),
        ("Students may also apply to {peers}.", "Scholars also go to {peers}."),
        (
            "Its students come from many countries.",
            "Like others of its rank it has faculties, libraries and research groups.",
        ),
    ),
    "battle": Wording(
        (
            (
                "The {name} took place in {year} in what is now {country:the}.",
                "In {year} the {name} took place in what is now {country:the}.",
                "The {name} took place in {year}.",
            ),
            ("It belongs to this chapter of history: {war}.", "Historians place it under this heading: {war}."),
            ABOUT,
        ),
        ("war",),
        ("To the same chapter belongs the {peer}.", "Another fight of that time was the {peer}."),
        (
            MATE,
            "Historians have written whole books about it.",
        ),
    ),
    "treaty": Wording(
        (
            (
                "The text of the {name} was agreed on at {place} in {year}.",
                "At {place} the {name} came into being in {year}.",
            ),
            ABOUT,
        ),
        (),
        ("Students also learn about the {peer}.", "Textbooks also explain the {peer}."),
        (
            MATE,
            "Its text can be read in archives and on the net.",
        ),
    ),
    "games": Wording(
        (
            ("The {name} were held in {city}.", "{city} was the host of the {name}."),
            ("What people recall: {about}.", "A memory of those weeks: {about}."),
        ),
        (),
        ("Sports fans also talk about the {peer}.", "Chronicles also tell of the {peer}."),
        ("Athletes from many countries came for the competitions and the ceremonies.",),
    ),
    "myth": Wording(
        (
            (
                "{name:cap} is a figure of {culture} myth, a child of {parent}.",
                "In {culture} myth {name} is a child of {parent}.",
                "{name:cap} is a figure of {culture} myth.",
            ),
            ("The stories tell this: {about}.", "It is told that {about}."),
        ),
        ("culture",),
        ("The same stories tell of {peers}.", "Storytellers also speak of {peers}."),
        (
            "Poets, painters and sculptors have taken up the subject again and again.",
            "Children still hear such tales at school.",
        ),
    ),
}
