"""The sentences on which text encoders are calibrated if a user gives none."""

SUBJECTS = (
    "a red car",
    "two dogs playing with a ball",
    "an old stone bridge over a river",
    "a bowl of noodle soup",
    "a woman riding a bicycle",
    "the moon behind thin clouds",
    "children on a beach",
    "a black and white portrait of a man",
    "a screenshot of a spreadsheet",
    "snow on a mountain hut",
    "a yellow umbrella",
    "three hot air balloons",
    "a cat asleep on a laptop",
    "the skyline of Chicago",
    "a hand-drawn map",
    "fresh bread and butter",
    "an empty railway station",
    "a football player jumping",
    "wild horses",
    "a bouquet of tulips in a glass vase",
    "a jet engine, close up",
    "a street market",
    "an X-ray of a knee",
    "a pair of running shoes",
)

# A word or two as in a search, a label, a caption, and a description.
FORMS = (
    "{}",
    "a photo of {}.",
    "{} at sunset, seen from far away",
    "This picture shows {} on the left. On the right there are a wooden fence and some trees, and "
    "in the background 7 people are walking towards a white house.",
)

SENTENCES = tuple(form.format(subject) for subject in SUBJECTS for form in FORMS)
