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

# topic -> (item, reason)
REASONS = {
    "good reasons to ride a bicycle to work": [
        ("Exercise", "it keeps your heart and legs strong"),
        ("Low cost", "a bicycle needs no fuel and little repair"),
        ("Clean air", "it gives off no exhaust gases"),
        ("Easy parking", "a bicycle fits almost anywhere"),
        ("No queues", "you can pass slow traffic on a cycle path"),
    ],
    "things to pack for a day of hiking": [
        ("Water", "walking uphill makes you thirsty"),
        ("A map", "a phone may lose its signal in the hills"),
        ("A rain jacket", "mountain weather changes quickly"),
        ("Plasters", "new boots can rub your heels"),
        ("A snack", "it gives you energy on the way back"),
        ("A torch", "you may return after sunset"),
    ],
    "habits that help you sleep well": [
        ("A fixed bedtime", "your body learns when to grow tired"),
        ("A dark room", "light tells the brain to stay awake"),
        ("No late coffee", "its caffeine works for many hours"),
        ("A cool bedroom", "the body falls asleep more easily when it cools down"),
        ("A quiet hour", "it lets your thoughts come to rest"),
    ],
    "ways to save electricity at home": [
        ("LED lamps", "they turn most of their power into light"),
        ("Full washing loads", "the machine runs less often"),
        ("Lids on pots", "they keep the heat inside while you cook"),
        ("Switches on sockets", "devices on standby still draw power"),
        ("Drying in the open air", "sun and wind cost nothing"),
    ],
    "advantages of reading every day": [
        ("New words", "you meet them in sentences that explain them"),
        ("Concentration", "a story asks you to follow it closely"),
        ("Knowledge", "every book holds facts you did not know"),
        ("Calm", "a quiet half hour lowers stress"),
        ("Better writing", "you notice how good sentences are built"),
    ],
    "reasons to plant a tree in the garden": [
        ("Shade", "its crown keeps the ground cool in summer"),
        ("Birds", "they find food and places to nest"),
        ("Clean air", "leaves catch dust and take in carbon dioxide"),
        ("Firm soil", "roots hold the earth when it rains"),
        ("Fruit", "an apple or cherry tree gives a harvest each year"),
    ],
    "rules for working safely in a kitchen": [
        ("Wash your hands", "dirt and germs must not reach the food"),
        ("Turn pot handles inward", "a handle that sticks out is easily knocked"),
        ("Cut away from your fingers", "a knife can slip"),
        ("Wipe up spills", "a wet floor is slippery"),
        ("Keep cloths away from flames", "they catch fire easily"),
    ],
    "skills that make a good team member": [
        ("Listening", "you learn what the others need"),
        ("Being on time", "nobody has to wait for you"),
        ("Clear speech", "it prevents misunderstandings"),
        ("Honesty", "mistakes are found before they grow"),
        ("Patience", "not everyone works at the same speed"),
    ],
    "benefits of keeping a diary": [
        ("Memory", "you can look up what happened and when"),
        ("Order", "writing sorts your thoughts"),
        ("Progress", "old pages show how far you have come"),
        ("Practice", "writing daily makes writing easier"),
    ],
    "reasons to learn a second language": [
        ("Travel", "you can talk with people in other countries"),
        ("Work", "many employers look for it"),
        ("Memory", "learning words trains the mind"),
        ("Culture", "you can enjoy films and books in the original"),
        ("Friendship", "people like to be greeted in their own language"),
    ],
    "materials that are good for building a house": [
        ("Wood", "it is light, strong and keeps out the cold"),
        ("Brick", "it lasts for many years and does not burn"),
        ("Glass", "it lets in daylight"),
        ("Steel", "it carries heavy loads over wide rooms"),
        ("Stone", "it stands up to wind and rain"),
    ],
    "signs that a plant needs care": [
        ("Yellow leaves", "it may have too much water or too little light"),
        ("Dry soil", "its roots cannot take up food without water"),
        ("Thin, long stems", "it is reaching for more light"),
        ("Roots outside the pot", "it needs a larger pot"),
        ("Spots on the leaves", "insects or a fungus may be at work"),
    ],
}

# task -> steps
HOWTOS = {
    "make a cup of tea": [
        "Boil fresh water in a kettle",
        "Put one tea bag into a cup",
        "Pour the hot water over the tea bag",
        "Wait for three to five minutes",
        "Take out the tea bag",
        "Add milk, sugar or lemon as you like",
    ],
    "plant a seed in a pot": [
        "Fill a small pot with loose soil",
        "Press a hole into the soil with your finger",
        "Drop the seed into the hole",
        "Cover the seed lightly with soil",
        "Water the soil until it is damp",
        "Set the pot in a warm and bright place",
    ],
    "mend a flat bicycle tyre": [
        "Turn the bicycle over and take off the wheel",
        "Lift the tyre from the rim and pull out the tube",
        "Pump up the tube and listen for the leak",
        "Roughen the rubber around the hole and spread glue on it",
        "Press a patch on the glue and let it dry",
        "Put everything back and pump up the tyre",
    ],
    "cook plain rice": [
        "Rinse one cup of rice in cold water",
        "Put the rice and two cups of water into a pot",
        "Add a pinch of salt and bring the water to the boil",
        "Cover the pot and turn down the heat",
        "Let the rice cook gently for about fifteen minutes",
        "Let it stand for five minutes before you serve it",
    ],
    "write a letter of thanks": [
        "Begin with the date and a friendly greeting",
        "Say clearly what you are thankful for",
        "Describe how the gift or the help was useful",
        "Add a sentence about your own news",
        "Close with a warm wish and your name",
    ],
    "wash a woollen sweater by hand": [
        "Fill a basin with cool water",
        "Stir in a little mild soap for wool",
        "Press the sweater gently in the water without rubbing",
        "Rinse it in clean water of the same temperature",
        "Roll it in a towel to take out the water",
        "Lay it flat to dry, away from the sun",
    ],
    "prepare for a test": [
        "Find out which topics the test will cover",
        "Make a plan with a short session for each topic",
        "Read your notes and mark what is unclear",
        "Practise with questions and check the answers",
        "Repeat the hard parts on the day before",
        "Go to bed early and eat breakfast",
    ],
    "change a light bulb": [
        "Switch off the lamp and let the bulb cool down",
        "Stand on something firm that does not wobble",
        "Turn the old bulb to the left until it comes out",
        "Turn the new bulb to the right until it sits firmly",
        "Switch on the lamp to see that it works",
    ],
    "paint a wooden chair": [
        "Clean the chair and let it dry",
        "Rub the old paint smooth with sandpaper",
        "Wipe off the dust with a damp cloth",
        "Lay newspaper under the chair",
        "Brush on a thin coat of paint along the grain",
        "Let it dry and add a second coat",
    ],
    "make a simple salad": [
        "Wash the lettuce and shake it dry",
        "Cut tomatoes and cucumber into slices",
        "Mix oil, vinegar, salt and pepper in a cup",
        "Put the vegetables into a large bowl",
        "Pour the dressing over them and toss well",
    ],
    "treat a small cut": [
        "Wash your hands with soap",
        "Press a clean cloth on the cut until the bleeding stops",
        "Rinse the cut with clean water",
        "Dry the skin around it",
        "Cover the cut with a plaster",
        "Change the plaster every day",
    ],
    "borrow a book from a library": [
        "Show your identity card to get a library card",
        "Look for the title in the catalogue",
        "Write down where the book stands",
        "Fetch the book from its shelf",
        "Have it recorded at the desk",
        "Bring it back before the date you were given",
    ],
}
