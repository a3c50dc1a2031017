"""Write tests/data/llama_cpp_tokens.json.gz: what llama.cpp makes of a few thousand texts with the demo's tokenizer.

Run where llama-cpp-python is installed (it needs a C++ compiler; nothing else here needs it):

    python tools/llama_cpp_tokens.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf tests/data/llama_cpp_tokens.json.gz

The texts come from a seeded generator, so the same versions write the same bytes again. Each row is the text and
its ids with control tokens parsed; texts that spell control tokens carry a third item, the ids with them read as
plain text.
"""

# ruff: noqa: RUF001  (texts in many scripts are the point)
from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path

WORDS = (
    "the a of and to in is was that it for on with as his they be at one have this from or had by hot but some what "
    "there we can out other were all your when up use word how said an each she which do their time if will way "
    "about many then them would write like so these her long make thing see him two has look more day could go come "
    "did number sound no most people my over know water than call first who may down side been now find any new work "
    "part take get place made live where after back little only round man year came show every good me give our "
    "under name very through just form much great think say help low line before turn cause same mean differ move "
    "right boy old too does tell sentence set three want air well also play small end put home read hand port large "
    "internationalisation Schadenfreude antidisestablishmentarianism JavaScript PyTorch e.g. i.e. Mr. U.S.A. don't "
    "I'm you've they'll he'd it's 'tis o'clock DON'T I'M we'Ll naïve café Zürich rock'n'roll co-operate x86_64"
).split()
SENTENCES = (
    "What is the capital of France?",
    "Los niños comieron piñas; ¿verdad? ¡Sí!",
    "Als Gregor Samsa eines Morgens erwachte, fand er sich in größerer Ungewißheit.",
    "Où est l'été ? À Noël, ça coûte 3 €.",
    "Pchnąć w tę łódź jeża lub ośm skrzyń fig. Příliš žluťoučký kůň.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "İstanbul'da ılık bir gün; ŞİİR ve ışık.",
    "Nhớ người yêu cũ, tôi đi đường vòng quanh hồ.",
    "敏捷的棕色狐狸跳过了懒狗。「你好，世界！」",
    "いろはにほへと　ちりぬるを。カタカナとﾊﾝｶｸ。東京都2024年",
    "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다.",
    "السلام عليكم ورحمة الله وبركاته ١٢٣٤٥",
    "שלום עולם, מה שלומך היום?",
    "नमस्ते दुनिया, आप कैसे हैं? १२३",
    "สวัสดีชาวโลก วันนี้อากาศดีมาก ๑๒๓",
    "বাংলা ভাষা সুন্দর। தமிழ் மொழி. ఆంధ్ర 2.5%",
    "እንደምን አለህ? ქართული ენა. Հայերեն լեզու.",
    "def f(x: int) -> list[int]:\n    return [i ** 2 for i in range(x)]  # squares\n",
    'for (int i = 0; i < 10; ++i) {\n\tprintf("%d\\n", a[i] >> 2);\r\n}',
    "SELECT * FROM users WHERE id >= 42 AND name LIKE '%o''brien%';",
    '<div class="a b">&amp; <!-- note --></div>\n\n\n<p>1 < 2</p>',
    "https://example.org/path?q=1&r=%20#frag user.name+tag@example.com",
    "$$\\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2}$$ ∑∏√∞≠≤±×÷",
    "| a | b |\n|---|:-:|\n| **1** | _2_ |\n\n- [x] done\n  1. item\n```py\nx=1\n```",
    '{"a": [1, 2.5e-10, null, true], "b\\u00e9": "\\n"}',
    "10,000.00 + 3/4 = 1e5; 007 0x1F 192.168.0.1 2024-02-30T23:59:60Z +49 (0)30 12345",
    "👩‍👩‍👧‍👦 👍🏽 🇫🇷🇩🇪 ❤️ 1️⃣ 🏴󠁧󠁢󠁥󠁮󠁧󠁿 ☃︎ 😀😂🤷‍♂️",
)
NUMERALS = "0123456789٠٣٩०५९๐๙０５９²³¹½¾⅓ⅧⅫⅻ①⑳㉑〇一二三十百万𝟘𝟡𐄇৳௰፲ᛮ〡"
SPACES = " \t\n\r\v\f\u0085\u00a0\u1680\u2000\u2003\u2009\u200a\u2028\u2029\u202f\u205f\u3000\u200b\u2060\ufeff\u180e"
MARKS = "\u0300\u0301\u0308\u0323\u0327\u0345\u05b0\u064b\u0670\u093c\u094d\u0e38\u0e47\u1160\u11a8\u20dd\ufe0f\u200d"
JAMO = "ᄀᄂᄃᄅ마ᅢᅣᅤᅥᆨᆩᆪ가각힣ㄱㅏㅎㆎ"
CONTROL_LIKE = (
    "<|im_start|> <|im_end|> <|endoftext|> <repo_name> <reponame> <file_sep> <filename> <gh_stars> <issue_start> "
    "<issue_comment> <issue_closed> <jupyter_start> <jupyter_text> <jupyter_code> <jupyter_output> <jupyter_script> "
    "<empty_output> <|im_start <|im_end|>> <<|im_end|>> <|IM_END|> <|im_end |> < |im_end|> <|eot_id|> <s> </s> "
    "[INST] <|im_start|><|im_start|> <|endoftext|x <pad> <unk> |im_end|> <｜im_end｜>"
).split()
PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~¡«»¿–—‘’“”…‰′″※、。「」！？￥§¶†‡•¬¦¨¯´¸"
# First and last code point of blocks of every kind, the unassigned and the private ones too.
BLOCKS = (
    (0x00, 0x7F), (0x80, 0xFF), (0x100, 0x24F), (0x250, 0x36F), (0x370, 0x52F), (0x530, 0x7FF), (0x800, 0xDFF),
    (0xE00, 0x13FF), (0x1400, 0x1FFF), (0x2000, 0x2BFF), (0x2C00, 0x2FFF), (0x3000, 0x33FF), (0x3400, 0x9FFF),
    (0xA000, 0xABFF), (0xAC00, 0xD7FF), (0xE000, 0xF8FF), (0xF900, 0xFFFD), (0x10000, 0x10FFF), (0x11000, 0x16FFF),
    (0x1B000, 0x1D7FF), (0x1D800, 0x1EFFF), (0x1F000, 0x1FAFF), (0x20000, 0x2FFFF), (0xE0000, 0x10FFFF),
)  # fmt: skip


def english(rng: random.Random) -> str:
    """A sentence of common words with changing case, joints and numbers."""
    parts = []
    for _ in range(rng.randint(1, 14)):
        word = rng.choice(WORDS)
        word = rng.choice(
            [word, word, word, word.capitalize(), word.upper(), str(rng.randint(0, 10 ** rng.randint(1, 9)))]
        )
        parts.append(
            word + rng.choice([" ", " ", " ", " ", ", ", ". ", "; ", "! ", "-", "/", "  ", "\n", " (", ') "', "'s "])
        )
    return "".join(parts)


def drawn(rng: random.Random, alphabet: str, longest: int) -> str:
    """Characters of one alphabet, at times repeated."""
    return "".join(rng.choice(alphabet) * rng.choice([1, 1, 1, 2, 3, 5]) for _ in range(rng.randint(1, longest)))


def unicode(rng: random.Random, longest: int) -> str:
    """Random code points, from one block or from all."""
    fixed = rng.choice([None, *BLOCKS])
    points = [rng.randint(*(fixed or rng.choice(BLOCKS))) for _ in range(rng.randint(1, longest))]
    return "".join(chr(point) for point in points if not 0xD800 <= point <= 0xDFFF)


def marked(rng: random.Random) -> str:
    """Letters with stacks of combining marks, joiners and variation selectors."""
    return "".join(rng.choice("aeoAEéçßиक아ก☺") + drawn(rng, MARKS, 3) for _ in range(rng.randint(1, 6)))


def spaced(rng: random.Random) -> str:
    """Words between runs of all kinds of white space."""
    words = [drawn(rng, SPACES, 5) + rng.choice([*WORDS, "", ".", "7", "é", "'s"]) for _ in range(rng.randint(1, 6))]
    return "".join(words) + rng.choice(["", drawn(rng, SPACES, 5)])


def cut(rng: random.Random) -> str:
    """A slice of a known sentence, at times with its case changed."""
    text = rng.choice(SENTENCES)
    start = rng.randint(0, len(text) - 1)
    text = text[start : start + rng.randint(1, 50)]
    return rng.choice([text, text, text.upper(), text.title(), text[::-1]])


def controls(rng: random.Random) -> str:
    """Control tokens and near misses between other text."""
    return "".join(
        rng.choice(CONTROL_LIKE) + rng.choice(["", " ", "\n", "user\n", english(rng)]) for _ in range(rng.randint(1, 5))
    )


def texts(count: int, seed: int = 0) -> Iterator[str]:
    """The texts, known sentences first, then ``count`` random ones; never the same twice."""
    rng = random.Random(seed)
    seen: set[str] = set()
    makers = (
        english,
        cut,
        spaced,
        marked,
        controls,
        lambda r: drawn(r, NUMERALS, 12),
        lambda r: drawn(r, PUNCTUATION, 10),
        lambda r: drawn(r, JAMO, 10),
        lambda r: unicode(r, 14),
        lambda r: "".join(rng.choice(makers[:9])(r) for _ in range(r.randint(2, 3)))[:90],
    )
    yield from ("", *SENTENCES)
    while len(seen) < count:
        text = makers[len(seen) % len(makers)](rng)
        if text not in seen:
            seen.add(text)
            yield text


def main() -> None:
    """Tokenize the texts with llama.cpp and write them with its ids."""
    import llama_cpp  # noqa: PLC0415  (this tool alone needs it)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    model = llama_cpp.Llama(str(arguments.model), vocab_only=True, verbose=False)
    rows = []
    for text in texts(arguments.count, arguments.seed):
        row = [text, model.tokenize(text.encode(), add_bos=False, special=True)]
        plain = model.tokenize(text.encode(), add_bos=False, special=False)
        rows.append(row if plain == row[1] else [*row, plain])
    document = {"llama_cpp_python": llama_cpp.__version__, "model": arguments.model.name, "rows": rows}
    data = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_bytes(gzip.compress(data, 9, mtime=0))
    print(f"{len(rows)} texts, {sum(len(row[1]) for row in rows)} tokens, {arguments.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
