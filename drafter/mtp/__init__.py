"""A policy's own MTP module as a drafter: DeepSeek-V3's and GLM-4.5's forms."""
