import torch

from bloomery.model.initial_values import bigram_factors


def counted(vocabulary: int = 48) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    chance = torch.rand(vocabulary, vocabulary, generator=generator) ** 6
    return (chance * 1000).round()


def test_the_factors_at_full_rank_predict_the_smoothed_bigrams() -> None:
    counts = counted()
    embedding, head = bigram_factors(counts, hidden=48, seed=1)
    normed = embedding / embedding.square().mean(1, keepdim=True).sqrt()
    unigram = counts.sum(0) / counts.sum()
    wanted = (counts + unigram) / (counts.sum(1, keepdim=True) + 1)
    scores = normed @ head.T + unigram.log()
    found = scores.softmax(-1)
    divergence = (wanted * (wanted.log() - found.log())).sum(1).mean()
    independent = (wanted * (wanted.log() - unigram.log())).sum(1).mean()
    assert divergence < 0.1 * independent


def test_the_factors_are_a_function_of_counts_and_seed() -> None:
    first, second = (bigram_factors(counted(), hidden=8, seed=3) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_model_that_is_wider_than_its_vocabulary_gets_all_factors_there_are() -> None:
    narrow, narrow_head = bigram_factors(counted(), hidden=48, seed=1)
    embedding, head = bigram_factors(counted(), hidden=60, seed=1)
    assert embedding.shape == head.shape == (48, 60)
    products = [
        factor / factor.square().mean(1, keepdim=True).sqrt() @ other.T
        for factor, other in ((narrow, narrow_head), (embedding, head))
    ]
    torch.testing.assert_close(*products, rtol=0.05, atol=0.05)


def test_tokens_that_never_occur_get_finite_factors_and_change_nothing_for_the_others() -> None:
    counts = counted()
    embedding, head = bigram_factors(counts, hidden=48, seed=1)
    wide = torch.zeros(50, 50)
    wide[:48, :48] = counts
    wide_embedding, wide_head = bigram_factors(wide, hidden=50, seed=1)
    assert wide_embedding.isfinite().all() and wide_head.isfinite().all()
    torch.testing.assert_close(
        wide_embedding[:48] @ wide_head[:48].T, embedding @ head.T, rtol=0.05, atol=0.05
    )


def test_the_length_of_the_head_is_the_mean_over_tokens_and_not_over_kinds_of_tokens() -> None:
    counts = torch.tensor([[400.0, 10.0, 90.0], [3.0, 1.0, 6.0], [30.0, 70.0, 5.0]])
    embedding, head = bigram_factors(counts, hidden=3, seed=0)
    after, unigram = counts.sum(1), counts.sum(0) / counts.sum()
    pmi = torch.log((counts + unigram) / (after[:, None] + 1.0) / unigram)
    ratios = pmi.norm(dim=1) / (2 * embedding @ head.T).norm(dim=1)  # each row's length by that of the head
    torch.testing.assert_close((ratios * after).sum() / after.sum(), torch.tensor(1.0), rtol=1e-3, atol=0)
    assert abs(ratios.mean() - 1) > 0.02


def test_where_there_are_few_factors_those_of_frequent_tokens_are_kept() -> None:
    turns = torch.tensor([[6.0, 2.0] * 4, [2.0, 6.0] * 4])
    halves = torch.tensor([[6.0] * 4 + [2.0] * 4, [2.0] * 4 + [6.0] * 4])
    frequent_before = torch.cat([1000 * turns, halves.repeat(3, 1)])
    for counts, axis in ((frequent_before, 0), (frequent_before.T, 1)):
        after, unigram = counts.sum(1, keepdim=True), counts.sum(0) / counts.sum()
        pmi = torch.log((counts + unigram) / (after + 1) / unigram)
        embedding, head = bigram_factors(counts, hidden=1, seed=0)
        found, wanted = ((one if axis == 0 else one.T)[0] for one in (embedding @ head.T, pmi))
        assert torch.nn.functional.cosine_similarity(found, wanted, dim=0) > 0.9
