"""Words and facts from which ``make_assets.py`` composes its rows; data only."""

# name, capital, continent, currency, a neighbour ("" where the sea is the only border)
COUNTRIES = [
    line.split("|")
    for line in """\
France|Paris|Europe|euro|Spain
Spain|Madrid|Europe|euro|Portugal
Portugal|Lisbon|Europe|euro|Spain
Germany|Berlin|Europe|euro|Poland
Italy|Rome|Europe|euro|Austria
Austria|Vienna|Europe|euro|Germany
Poland|Warsaw|Europe|złoty|Germany
Czechia|Prague|Europe|Czech koruna|Austria
Greece|Athens|Europe|euro|Albania
Norway|Oslo|Europe|Norwegian krone|Sweden
Sweden|Stockholm|Europe|Swedish krona|Norway
Finland|Helsinki|Europe|euro|Sweden
Denmark|Copenhagen|Europe|Danish krone|Germany
Ireland|Dublin|Europe|euro|the United Kingdom
Switzerland|Bern|Europe|Swiss franc|France
Hungary|Budapest|Europe|forint|Austria
Romania|Bucharest|Europe|leu|Hungary
Iceland|Reykjavík|Europe|Icelandic króna|
Egypt|Cairo|Africa|Egyptian pound|Libya
Kenya|Nairobi|Africa|Kenyan shilling|Tanzania
Morocco|Rabat|Africa|Moroccan dirham|Algeria
Ghana|Accra|Africa|cedi|Togo
Nigeria|Abuja|Africa|naira|Niger
Ethiopia|Addis Ababa|Africa|birr|Kenya
Namibia|Windhoek|Africa|Namibian dollar|Botswana
Botswana|Gaborone|Africa|pula|Namibia
Uganda|Kampala|Africa|Ugandan shilling|Kenya
Japan|Tokyo|Asia|yen|
India|New Delhi|Asia|Indian rupee|Nepal
Nepal|Kathmandu|Asia|Nepalese rupee|India
China|Beijing|Asia|yuan|Mongolia
Mongolia|Ulaanbaatar|Asia|tögrög|China
Thailand|Bangkok|Asia|baht|Laos
Vietnam|Hanoi|Asia|dong|Laos
South Korea|Seoul|Asia|won|North Korea
Canada|Ottawa|North America|Canadian dollar|the United States
Mexico|Mexico City|North America|Mexican peso|Guatemala
Cuba|Havana|North America|Cuban peso|
Brazil|Brasília|South America|real|Peru
Peru|Lima|South America|sol|Chile
Chile|Santiago|South America|Chilean peso|Argentina
Argentina|Buenos Aires|South America|Argentine peso|Chile
Uruguay|Montevideo|South America|Uruguayan peso|Brazil
Colombia|Bogotá|South America|Colombian peso|Peru
Australia|Canberra|Oceania|Australian dollar|
New Zealand|Wellington|Oceania|New Zealand dollar|""".splitlines()
]

# name, symbol, atomic number, state at room temperature, use
ELEMENTS = [
    line.split("|")
    for line in """\
hydrogen|H|1|gas|making ammonia for fertiliser
helium|He|2|gas|filling balloons
lithium|Li|3|solid|rechargeable batteries
carbon|C|6|solid|pencils, in the form of graphite
nitrogen|N|7|gas|keeping packed food fresh
oxygen|O|8|gas|helping patients breathe
neon|Ne|10|gas|bright signs
sodium|Na|11|solid|making table salt, together with chlorine
magnesium|Mg|12|solid|light alloys
aluminium|Al|13|solid|cans and aircraft parts
silicon|Si|14|solid|computer chips
sulfur|S|16|solid|making sulfuric acid
chlorine|Cl|17|gas|cleaning the water of swimming pools
titanium|Ti|22|solid|strong and light parts
iron|Fe|26|solid|making steel
nickel|Ni|28|solid|coins and stainless steel
copper|Cu|29|solid|electric wires
zinc|Zn|30|solid|protecting steel from rust
silver|Ag|47|solid|jewellery and mirrors
tin|Sn|50|solid|solder
iodine|I|53|solid|disinfecting wounds
tungsten|W|74|solid|the filaments of old light bulbs
gold|Au|79|solid|jewellery and electric contacts
mercury|Hg|80|liquid|old thermometers
lead|Pb|82|solid|car batteries""".splitlines()
]

# name, group, food, home, young
ANIMALS = [
    line.split("|")
    for line in """\
cow|mammal|grass and hay|on farms and grassland|calf
horse|mammal|grass and hay|on farms and open plains|foal
sheep|mammal|grass and herbs|on farms and hills|lamb
goat|mammal|leaves and grass|on farms and in mountains|kid
pig|mammal|roots, plants and small animals|on farms and in forests|piglet
cat|mammal|meat|in homes and on farms|kitten
lion|mammal|meat|on the savanna|cub
tiger|mammal|meat|in the forests of Asia|cub
kangaroo|mammal|grass and leaves|in Australia|joey
elephant|mammal|grass, leaves and bark|on savannas and in forests|calf
blue whale|mammal|krill|in the open sea|calf
hen|bird|seeds and insects|on farms|chick
duck|bird|plants and small water animals|on ponds, lakes and rivers|duckling
swan|bird|water plants|on lakes and rivers|cygnet
goose|bird|grass and water plants|on lakes and wet meadows|gosling
owl|bird|mice and other small animals|in forests and fields|owlet
eagle|bird|fish and small animals|in mountains and on coasts|eaglet
penguin|bird|fish and krill|on southern coasts|chick
frog|amphibian|insects and worms|in ponds and on damp ground|tadpole
salmon|fish|insects and smaller fish|in rivers and the sea|fry
shark|fish|fish and other sea animals|in the sea|pup
crocodile|reptile|fish and other animals|in warm rivers and swamps|hatchling
tortoise|reptile|plants|on dry land|hatchling
bee|insect|nectar and pollen|in hives|larva
butterfly|insect|nectar|in meadows and gardens|caterpillar""".splitlines()
]
GROUP_MARKS = {
    "mammal": "mammals feed their young with milk",
    "bird": "birds have feathers and lay eggs",
    "amphibian": "amphibians begin life in water and later live on land too",
    "fish": "fish breathe in water through gills",
    "reptile": "reptiles have dry skin covered with scales",
    "insect": "insects have six legs and a body in three parts",
}

# name, kind, remark; in order from the Sun
PLANETS = [
    ("Mercury", "rocky planet", "It is the smallest planet and has no moon."),
    ("Venus", "rocky planet", "It is the hottest planet, because thick clouds hold its heat."),
    ("Earth", "rocky planet", "It is the only planet on which life is known, and it has one moon."),
    ("Mars", "rocky planet", "Its soil is red with rust, and it has two small moons."),
    ("Jupiter", "gas giant", "It is the largest planet, and a great storm makes its red spot."),
    ("Saturn", "gas giant", "It is known for its wide, bright rings of ice and rock."),
    ("Uranus", "ice giant", "It is tipped so far over that it seems to roll around the Sun."),
    ("Neptune", "ice giant", "It is the planet farthest from the Sun, and its winds are fierce."),
]
ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth"]

# base, third person, past, rest of the sentence
PREDICATES = [
    line.split("|")
    for line in """\
walk|walks|walked|to the market
bake|bakes|baked|fresh bread
write|writes|wrote|a letter to a friend
visit|visits|visited|the museum
water|waters|watered|the garden
paint|paints|painted|the old fence
ride|rides|rode|a bicycle along the river
teach|teaches|taught|a music class
buy|buys|bought|apples and pears
sing|sings|sang|in the choir
swim|swims|swam|across the lake
carry|carries|carried|the boxes upstairs
study|studies|studied|the map
drive|drives|drove|to the coast
cook|cooks|cooked|soup for the neighbours
feed|feeds|fed|the ducks
drink|drinks|drank|tea with lemon
sweep|sweeps|swept|the stairs
draw|draws|drew|a picture of the harbour
take|takes|took|the early train""".splitlines()
]
SUBJECTS = [
    "Maria",
    "My brother",
    "The teacher",
    "Our neighbour",
    "The baker",
    "Tom",
    "The nurse",
    "The farmer",
]
TIMES = [
    ("every morning", "yesterday morning", "tomorrow morning"),
    ("every evening", "yesterday evening", "tomorrow evening"),
    ("every Monday", "last Monday", "next Monday"),
    ("every summer", "last summer", "next summer"),
]
NAMES = [
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Elena",
    "Felix",
    "Grace",
    "Hugo",
    "Ines",
    "Jonas",
    "Kira",
    "Leo",
    "Mina",
    "Noah",
]

# from unit, to unit, factor
UNITS = [
    ("kilometres", "metres", 1000),
    ("metres", "centimetres", 100),
    ("centimetres", "millimetres", 10),
    ("kilograms", "grams", 1000),
    ("tonnes", "kilograms", 1000),
    ("litres", "millilitres", 1000),
    ("hours", "minutes", 60),
    ("minutes", "seconds", 60),
    ("days", "hours", 24),
    ("weeks", "days", 7),
    ("feet", "inches", 12),
    ("yards", "feet", 3),
]

CATEGORIES = {
    "fruit": ["apple", "pear", "cherry", "banana", "lemon", "plum", "grape", "peach"],
    "vegetables": ["carrot", "onion", "cabbage", "spinach", "leek", "radish", "turnip", "broccoli"],
    "animals": ["rabbit", "badger", "otter", "donkey", "spider", "falcon", "lizard", "hamster"],
    "tools": ["hammer", "pliers", "chisel", "spanner", "shovel", "ladder", "trowel", "scissors"],
    "clothes": ["jacket", "scarf", "mitten", "trousers", "sweater", "sandal", "blouse", "apron"],
    "vehicles": ["lorry", "tractor", "ferry", "bicycle", "tram", "scooter", "van", "submarine"],
    "instruments": ["violin", "trumpet", "piano", "flute", "cello", "clarinet", "guitar", "harp"],
}
MARKET = {
    "fruit sold in kilograms": ["apples", "pears", "plums", "cherries", "grapes", "lemons"],
    "visitors on each day": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"],
    "books lent by subject": ["history", "science", "poetry", "travel", "cooking", "music"],
    "trees in the park by kind": ["oak", "birch", "maple", "pine", "willow", "beech"],
    "letters delivered by street": [
        "Hill_Road",
        "Mill_Lane",
        "Park_Street",
        "Station_Road",
        "Bridge_Lane",
    ],
}
