"""Quality of a KV cache: next-token distributions against an exact reference, one token at a time.

Batched perplexity would show what prefill does; decode reads the cache one query at a time and is what tiers,
formats and skipped pages change. So a prefix is processed in batches, and then every token of the text is fed on
its own and the distribution that follows it is compared with the reference's (`divergence`, `scoring`).
"""
