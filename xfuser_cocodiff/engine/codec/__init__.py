"""Codecs of values on slow links: grids, kernels in Triton and PyTorch, link references. Nothing here communicates.
Input: tensors of any strides, and the link references that both ends of a link share.
Output: payload bytes, decoded values, new link references and their error.
Public: `coded_tensor.encode`, `coded_tensor.decode`, `codec.Codec`, `link_reference.LinkReference`, `kernels.use`.
"""
