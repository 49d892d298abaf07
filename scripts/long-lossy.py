"""A long generation at a fixed lossy budget: resident memory and decode rate must stay flat.

python scripts/long-lossy.py --tokens 20000 --host 24MiB
"""

from __future__ import annotations

import argparse
import time

import psutil

from kvtier import Llama
from kvtier.model.names import resolve
from kvtier.settings import KVSettings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--host", default="24MiB")
    parser.add_argument("--policy", default=None)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--every", type=int, default=2000)
    args = parser.parse_args()
    settings = KVSettings(host=args.host, fidelity="lossy")
    n_ctx = args.tokens + 256
    with Llama(
        str(resolve(args.model)),
        n_ctx=n_ctx,
        n_batch=64,
        n_ubatch=64,
        n_threads=args.threads,
        n_threads_batch=args.threads,
        rope_scaling_type=2,
        rope_freq_scale=8192 / n_ctx,
        verbose=False,
        seed=1,
        kv_settings=settings,
        policy=args.policy,
    ) as llm:
        process = psutil.Process()
        llm.eval(llm.tokenize(b"It was the best of times, it was the worst of times,"))
        n, n_before, start = 0, 0, time.perf_counter()
        while n < args.tokens:
            llm.eval([llm.sample(temp=0.9)])
            n += 1
            if n % args.every == 0 or n == 256:
                seconds = time.perf_counter() - start
                f = llm.kv.figures
                print(
                    f"{n:6d} tokens: rss {process.memory_info().rss / 2**20:.1f} MiB, cache "
                    f"{f.tiers['host'].held_bytes / 2**20:.2f} MiB "
                    f"({f.tiers['host'].n_pages:,} pages, {f.tiers['none'].n_pages:,} gone), "
                    f"{(n - n_before) / seconds:.1f} tokens/s",
                    flush=True,
                )
                n_before, start = n, time.perf_counter()


if __name__ == "__main__":
    main()
