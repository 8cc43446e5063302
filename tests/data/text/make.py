"""Generates the files beside this one: small random models with both towers, and their tokenizers.

Each folder is written by transformers, loaded by it again, and run. It needs the versions that
../README.md names.
"""

# ruff: noqa: RUF001 (the sentences have letters that look like others)

import gzip
import importlib.util
import io
import itertools
import json
import lzma
import random
import string
import tempfile
import unicodedata
import zlib
from pathlib import Path

import numpy as np
import sentencepiece
import tokenizers
import torch
import transformers
from tokenizers import normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers.convert_slow_tokenizer import bytes_to_unicode

FOLDER = Path(__file__).parent

# Pixels of an image, and of a patch.
SIDE, PATCH = 32, 8

# Numbers of tokens of the texts of random ids.
LENGTHS = (1, 2, 7, 64, 77, 200)

# Merges of CLIP's vocabulary that are kept.
MERGES = 600

# Texts of which the models compute the similarity to images, as parts of the sentences.
COMPARED = slice(0, 6)


# Sentences

SUBJECTS = "cat dog car fox tower bridge guitar airplane sandwich Labrador bicycle volcano".split()
PLACES = ("on a table", "in Paris", "at night", "under water", "seen from above", "by the sea")
LOOKS = "red blue tiny HUGE old shiny black-and-white 19th-century".split()
PATTERNS = (
    "a photo of a {} {} {}.",
    "A photo of the {} {}, {}",
    "itap of a {} {} {}!",
    "THE {} {} ({})",
    'a "{}" {} -- {}?',
    "it's a {} {}'s picture; we've been {}",
)
FOREIGN = (
    "ΟΔΥΣΣΕΥΣ ΣΑΣ ΚΑΛΩΣΟΡΙΖΕΙ ΣΤΗΝ ΙΘΑΚΗ",
    "Ο Σίσυφος, ΣΊΣΥΦΟΣ! ς σ Σ",
    "İstanbul'da IŞIK ve ıhlamur, İI iı",
    "Straße STRASSE ẞ ß ﬁne ﬂat ﬃ Ǆ ǅ ǆ",
    "Ein Mädchen mit Fahrrad über der Brücke",
    "une photo d'un chat noir à côté d'une fenêtre",
    "фотография КРАСНОЙ машины, Ёж",
    "一只红色的汽车停在路边。",
    "赤い車の写真、東京タワー。カタカナ ｶﾀｶﾅ ガ",
    "빨간 자동차 사진 한국어",
    "รูปถ่ายของรถสีแดง",
    "صورة سيارة حمراء، مُحَمَّد ﷺ ﻻ",
    "תמונה של מכונית אדומה שָׁלוֹם",
    "लाल कार की एक तस्वीर क्ष",
    "①②③ ㎏ ½ ™ Å Å Å ﬀ ｆｕｌｌ　ｗｉｄｔｈ",
    "café café CAFÉ CAFÉ ñ ñ ạ̈",
    "😀 a smiling 😺cat👍🏽 👩‍👩‍👧‍👦 🇫🇷🇩🇪 ❤️ ☃",
    "a\u200bb\u200cc\u200dd\ufeffe\u00adf\u2060g",
    "price: $3.99 (50% off) #sale @home & more <b>bold</b> &amp; &lt;",
    "don't I'M we'LL they'd you're it'S 'tis o'clock",
    "https://example.org/a_b?c=d&e=f#g mail@example.org",
    "C++ & C# > Java; a[0] = {x: 1}; \\n ~/.bashrc `ls` ^_^ |pipe|",
    "2026-11-27 3:45pm 1,000,000 3.14159 0x1F ١٢٣ ४५६",
    "▁a ▁ ▁▁ b▁c",
    "…—–“quotes”‘single’ «guillemets» ¿qué? ¡sí!",
)
SPACES = ("", " ", "   ", "\t", "\n", "\r\n", "\u00a0", "\u3000", "\u200b", "\u2028", "\u0085")
SPECIAL = ("</s>", "<unk>", "<eos>", "<bos>", "<pad>", "<mask>", "<0x41>", "<|endoftext|>")
# Characters of all kinds: of Latin to Thai, of the general punctuation to symbols, CJK, and others.
BLOCKS = ((0, 0x250), (0x300, 0x600), (0x600, 0xE80), (0x2000, 0x2C00), (0x3000, 0x3400))
BLOCKS += ((0x4E00, 0x4F00), (0xAC00, 0xAD00), (0xFB00, 0x10000), (0x1F300, 0x1FA00))


def make_sentences():
    """Returns sentences of all kinds, and those of words, on which tokenizers are trained."""
    rng = random.Random(0)
    captions = [
        rng.choice(PATTERNS).format(rng.choice(LOOKS), rng.choice(SUBJECTS), rng.choice(PLACES))
        for _ in range(300)
    ]
    cased = [rng.choice((str.upper, str.title, str.swapcase))(x) for x in captions[:100]]
    drawn = [
        "".join(chr(rng.randrange(*rng.choice(BLOCKS))) for _ in range(rng.randrange(1, 24)))
        for _ in range(250)
    ]
    punctuated = [
        "".join(rng.choice(string.punctuation + " ab\t") for _ in range(rng.randrange(1, 20)))
        for _ in range(100)
    ]
    control = [
        "".join(chr(rng.choice((*range(33), 127, 0x85, 97, 98))) for _ in range(12))
        for _ in range(60)
    ]
    spaced = [f"{a}a photo{b}of{c}" for a, b, c in itertools.product(SPACES[1:], repeat=3)][::8]
    joined = [f"{rng.choice(captions)}, {rng.choice(FOREIGN)}" for _ in range(100)]
    marked = [f"{rng.choice(captions)} {mark}" for mark in SPECIAL]
    marked += [f"a{mark} b  {mark}{mark}C" for mark in SPECIAL]
    long = [
        "a photo of a red car. " * 455,
        "z" * 10_000,
        "赤い車" * 3334,
        " " * 10_000,
        "!" * 10_000,
    ]
    normal = [unicodedata.normalize(form, x) for form in ("NFD", "NFKC") for x in FOREIGN]
    words = captions + cased + joined
    others = drawn + punctuated + control + spaced + marked + long + normal
    return [*words, *others, *FOREIGN, *SPACES, *SPECIAL], words


# Tokenizers


def train_unigram(words, folder):
    """Writes spiece.model as c4_en's: Unigram, 0 is <pad>, 1 </s>, 2 <unk>, normalised as NFKC."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(x.lower() for x in words),
        model_writer=model,
        vocab_size=400,
        hard_vocab_limit=False,
        character_coverage=0.98,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    (folder / "spiece.model").write_bytes(model.getvalue())
    return transformers.SiglipTokenizer(str(folder / "spiece.model"))


def train_bpe(words):
    """Returns a tokenizer as Gemma's: BPE with bytes for unknown characters."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    trained = tokenizers.Tokenizer(BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    trained.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(" ", "▁")]
    )
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = BpeTrainer(
        vocab_size=700,
        limit_alphabet=150,
        special_tokens=special + [f"<0x{i:02X}>" for i in range(256)],
    )
    trained.train_from_iterator(words, trainer)
    model = json.loads(trained.to_str())["model"]
    return transformers.Siglip2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(merge) for merge in model["merges"]],
        add_bos_token=False,
        add_eos_token=True,
        padding_side="right",
        model_max_length=64,
    )


def first_merges():
    """Returns CLIP's own tokenizer with the first merges of its vocabulary."""
    # The module itself is not imported, because it needs torchvision.
    (package,) = importlib.util.find_spec("open_clip").submodule_search_locations
    path = Path(package, "bpe_simple_vocab_16e6.txt.gz")
    lines = gzip.decompress(path.read_bytes()).decode().split("\n")[1 : 1 + MERGES]
    merges = [tuple(line.split()) for line in lines]
    letters = list(bytes_to_unicode().values())
    pieces = letters + [x + "</w>" for x in letters] + ["".join(merge) for merge in merges]
    pieces += ["<|startoftext|>", "<|endoftext|>"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    return transformers.CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=77)


# Models


def text_sizes(**changes):
    return {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
    } | changes


VISION = text_sizes(hidden_size=24, image_size=SIDE, patch_size=PATCH)


def siglip(vocabulary):
    text = text_sizes(vocab_size=vocabulary, projection_size=24)
    return transformers.SiglipModel(
        transformers.SiglipConfig(text_config=text, vision_config=VISION)
    )


def siglip2(vocabulary):
    text = text_sizes(vocab_size=vocabulary, projection_size=24)
    vision = {key: value for key, value in VISION.items() if key != "image_size"}
    vision["num_patches"] = (SIDE // PATCH) ** 2
    return transformers.Siglip2Model(
        transformers.Siglip2Config(text_config=text, vision_config=vision)
    )


def clip(vocabulary):
    """A CLIP with tokens behind its end token, so that it is not the largest of a text."""
    text = text_sizes(vocab_size=vocabulary + 3, eos_token_id=vocabulary - 1)
    return transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=20)
    )


def siglip_text():
    fields = text_sizes(
        vocab_size=90,
        max_position_embeddings=200,
        hidden_act="gelu",
        layer_norm_eps=0.01,
        projection_size=12,
    )
    return transformers.SiglipTextModel(transformers.SiglipTextConfig(**fields))


def clip_text():
    """A CLIP whose config has the end token of older versions."""
    fields = text_sizes(
        vocab_size=90, max_position_embeddings=200, eos_token_id=2, projection_dim=12
    )
    return transformers.CLIPTextModelWithProjection(transformers.CLIPTextConfig(**fields))


@torch.no_grad()
def draw(model, generator):
    """Draws all parameters at random; scale and bias of the similarities are like trained ones."""
    for name, parameter in model.named_parameters():
        value = torch.randn(parameter.shape, generator=generator)
        if name.endswith("logit_scale"):
            value = torch.full_like(value, 2.5)
        elif name.endswith("logit_bias"):
            value = torch.full_like(value, -3.25)
        elif name.endswith("bias"):
            value = 0.2 * value
        elif parameter.ndim == 1 and "norm" in name:
            value = 1 + 0.2 * value
        elif parameter.ndim > 1 and "embedding" not in name:
            value = value / parameter[0].numel() ** 0.5
        parameter.copy_(value)


def draw_ids(rng, config, length):
    """Returns ids [3, length]. Each text of a CLIP has an end token, and any tokens behind it."""
    if config.model_type != "clip_text_model":
        return torch.from_numpy(rng.integers(0, config.vocab_size, (3, length)))
    ids = rng.integers(0, config.vocab_size - 1, (3, length))
    end = config.vocab_size - 1 if config.eos_token_id == 2 else config.eos_token_id
    ids[np.arange(3), rng.integers(0, length, 3)] = end
    return torch.from_numpy(ids)


def run_texts(model, arrays, rng):
    """Adds what the text tower makes of random ids."""
    config = model.config.get_text_config()
    tower = getattr(model, "text_model", model)
    for length in LENGTHS:
        if length > config.max_position_embeddings:
            continue
        ids = draw_ids(rng, config, length)
        output = tower(ids, output_hidden_states=True)
        embeds = output.pooler_output
        if projection := getattr(model, "text_projection", None):
            embeds = projection(embeds)
        arrays[f"ids_{length}"] = ids.to(torch.uint16).numpy()
        arrays[f"text_embeds_{length}"] = embeds.float().numpy()
        if length == 7:
            arrays["last_hidden_state"] = output.last_hidden_state.float().numpy()
            arrays["pooler_output"] = output.pooler_output.float().numpy()
            arrays["hidden_state_-2"] = output.hidden_states[-2].float().numpy()


def run_both(model, ids, arrays, rng):
    """Adds the similarities of images to the first sentences."""
    images = np.uint8(rng.integers(0, 256, (3, SIDE, SIDE, 3)))
    arrays["images"] = images
    pixels = torch.from_numpy(images / 255)
    if model.config.model_type == "clip":
        mean, deviation = (
            transformers.image_utils.OPENAI_CLIP_MEAN,
            (transformers.image_utils.OPENAI_CLIP_STD),
        )
    else:
        mean = deviation = (0.5,) * 3
    pixels = (pixels - torch.tensor(mean).double()) / torch.tensor(deviation).double()
    more = {"pixel_values": pixels.permute(0, 3, 1, 2)}
    if model.config.model_type == "siglip2":
        side = SIDE // PATCH
        patches = pixels.reshape(3, side, PATCH, side, PATCH, 3).permute(0, 1, 3, 2, 4, 5)
        more = {
            "pixel_values": patches.reshape(3, side * side, -1),
            "pixel_attention_mask": torch.ones(3, side * side, dtype=torch.int32),
            "spatial_shapes": torch.full((3, 2), side),
        }
    texts = torch.from_numpy(ids[COMPARED].astype(np.int64))
    arrays["logits_per_image"] = model(input_ids=texts, **more).logits_per_image.float().numpy()


@torch.no_grad()
def generate(name, model, tokenizer, sentences):
    """Writes one folder."""
    folder = FOLDER / name
    folder.mkdir(exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    seed = zlib.crc32(name.encode())
    rng = np.random.default_rng(seed)
    draw(model, torch.Generator().manual_seed(seed))
    model.save_pretrained(folder)
    model = type(model).from_pretrained(folder).double().eval()
    arrays = {}
    run_texts(model, arrays, rng)
    if tokenizer is not None:
        length = tokenizer.model_max_length
        tokenizer.save_pretrained(folder)
        tokenizer = type(tokenizer).from_pretrained(folder)
        ids = tokenizer(sentences, padding="max_length", truncation=True, max_length=length)
        arrays["ids"] = np.array(ids["input_ids"], np.uint16)
        run_both(model, arrays["ids"], arrays, rng)
        for file in folder.glob("spiece.model"):
            Path(f"{file}.xz").write_bytes(lzma.compress(file.read_bytes(), preset=9))
            file.unlink()
    np.savez_compressed(folder / "expected.npz", **arrays)
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    print(name, sum(sizes.values()), sizes, flush=True)


def main():
    sentences, words = make_sentences()
    text = json.dumps(sentences, ensure_ascii=True, indent=0)
    (FOLDER / "sentences.json.xz").write_bytes(lzma.compress(text.encode(), preset=9))
    print(len(sentences), (FOLDER / "sentences.json.xz").stat().st_size)
    with tempfile.TemporaryDirectory() as folder:
        unigram = train_unigram(words, Path(folder))
        generate("siglip", siglip(len(unigram)), unigram, sentences)
    bpe = train_bpe(words)
    generate("siglip2", siglip2(len(bpe)), bpe, sentences)
    merges = first_merges()
    generate("clip", clip(len(merges)), merges, sentences)
    generate("siglip_text", siglip_text(), None, sentences)
    generate("clip_text", clip_text(), None, sentences)


if __name__ == "__main__":
    main()
