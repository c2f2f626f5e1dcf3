"""Answers nearest words over HTTP, from the newest checkpoint of a training of word vectors that goes on.

    pip install .
    torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/word2vec.py --checkpoints vectors
    python examples/serve.py vectors
    curl localhost:8000/list

Kill the training, or this: each answer is of one checkpoint, and says of which step. Neither waits for the
other. Run from a clone of the repository, word2vec.py can save changed rows only: add `--changes
intermittent` to it, and `--changes` to this.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from pydoc_data import topics
from urllib.parse import unquote

from torch.nn import functional

from ecemb.checkpoint import Follower, Snapshot
from ecemb.errors import CheckpointError

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("checkpoints", help="what word2vec.py has as --checkpoints")
parser.add_argument("--changes", action="store_true", help="word2vec.py runs with --changes")
parser.add_argument("--text", type=Path, help="what word2vec.py has as --text")
parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
args = parser.parse_args()


def read_vocabulary(text: str) -> list[str]:
    """The words by number, as in word2vec.py."""
    counts = Counter(re.findall(r"[^\W\d]+", text.lower()))
    return [word for word, count in counts.most_common() if count >= 3]


def nearest(snapshot: Snapshot, word: str, count: int = 7) -> list[str]:
    """The words whose vectors point most nearly to where this one's does."""
    vectors = functional.normalize(snapshot.tables["centres"]["weight"])
    closeness = vectors @ vectors[vocabulary.index(word)]
    return [vocabulary[i] for i in closeness.topk(count + 1).indices[1:]]


def follow() -> None:
    """Keeps the rows fresh. An error leaves the last ones in place."""
    while True:
        try:
            if follower.wait():
                print(f"step {follower.step} is served", flush=True)
        except CheckpointError as error:
            logging.warning("%s: %s", type(error).__name__, error)
            time.sleep(1)


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        word = unquote(self.path).strip("/").lower()
        if follower.step < 0:
            self.answer(503, {"error": "no checkpoint was read yet"})
        elif word not in vocabulary:
            self.answer(404, {"error": f"{word!r} is no word of the text"})
        else:
            snapshot = follower.snapshot  # taken once: the next checkpoint may come at any moment
            self.answer(200, {"word": word, "nearest": nearest(snapshot, word), "step": snapshot.step})

    def answer(self, status: int, content: dict[str, object]) -> None:
        body = json.dumps(content).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Not a line for each request."""


vocabulary = read_vocabulary(args.text.read_text("utf-8") if args.text else "\n".join(topics.topics.values()))
source = args.checkpoints
if args.changes:
    from baselines.check_n_run.following import Increments

    source = Increments(source)
follower = Follower(source, tables=["centres"])
server = ThreadingHTTPServer(("127.0.0.1", args.port), Answers)
print(f"http://127.0.0.1:{server.server_port}/list", flush=True)  # before another thread prints: lines mix
threading.Thread(target=follow, daemon=True).start()
server.serve_forever()
