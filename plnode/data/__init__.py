"""Data: the shipped corpus, its tokenizer, and the pure function from (step, index) to token ids."""

from plnode.data.corpus import Corpus, CorpusError, load_corpus, unigram_loss
from plnode.data.sampler import Sampler
from plnode.data.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Corpus", "CorpusError", "Sampler", "Tokenizer", "load_corpus", "load_tokenizer", "unigram_loss"]
