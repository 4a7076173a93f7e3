import torch


@torch.no_grad()
def attention(Q, K, V):
    scale = 0.08838834764831845  # 1 / sqrt(128)

    batch, heads, q_len, dim = Q.shape
    kv_heads, kv_len = K.shape[1], K.shape[2]
    v_dim = V.shape[3]
    device = Q.device

    # Rows that see no key keep these values.
    O = torch.zeros((batch, heads, q_len, v_dim), dtype=torch.float16, device=device)
    LSE = torch.full((batch, heads, q_len), float("-inf"), dtype=torch.float32, device=device)
    if batch == 0 or heads == 0 or q_len == 0 or kv_len == 0:
        return O, LSE

    # Query head h = j * group + g reads KV head j = floor(h * kv_heads / heads).
    group = heads // kv_heads

    Kf = K.to(torch.float32).contiguous()
    Vf = V.to(torch.float32).contiguous()

    # Block of queries: bounds the number of fp32 scores held at once.
    block = max(1, min(1024, (1 << 27) // (batch * heads * kv_len)))

    shift = kv_len - q_len
    k_pos = torch.arange(kv_len, device=device)

    for start in range(0, q_len, block):
        end = min(start + block, q_len)
        n = end - start

        # Position of the last query of the block is end - 1 + shift.
        k_end = min(kv_len, end + shift)
        if k_end <= 0:
            continue  # no query of this block sees a key

        q = Q[:, :, start:end, :].to(torch.float32) * scale
        q = q.reshape(batch, kv_heads, group * n, dim)
        k = Kf[:, :, :k_end, :]
        v = Vf[:, :, :k_end, :]

        s = torch.matmul(q, k.transpose(-1, -2))
        s = s.reshape(batch, heads, n, k_end)

        p_pos = torch.arange(start, end, device=device) + shift
        hidden = k_pos[:k_end].unsqueeze(0) > p_pos.unsqueeze(1)  # (n, k_end)
        s = s.masked_fill_(hidden, float("-inf"))

        m = s.amax(dim=-1, keepdim=True)
        m = torch.where(m == float("-inf"), torch.zeros_like(m), m)
        e = s.sub_(m).exp_()
        z = e.sum(dim=-1, keepdim=True)

        acc = torch.matmul(e.reshape(batch, kv_heads, group * n, k_end), v)
        acc = acc.reshape(batch, heads, n, v_dim)

        z_safe = torch.where(z == 0, torch.ones_like(z), z)
        O[:, :, start:end, :] = (acc / z_safe).to(torch.float16)
        LSE[:, :, start:end] = (m + torch.log(z)).squeeze(-1)

    return O, LSE
